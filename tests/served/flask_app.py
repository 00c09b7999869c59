import work
from flask import Blueprint, Flask, abort, request

routes = Blueprint("routes", __name__)


@routes.get("/items/<name>")
def item(name, tenant=None):
    return {"item": work.predict(name)}


@routes.post("/echo")
def echo(tenant=None):
    return request.get_data()


@routes.get("/fail")
def fail(tenant=None):
    raise ValueError("as asked")


@routes.get("/refuse")
def refuse(tenant=None):
    abort(403)


@routes.get("/stream")
def stream(tenant=None):
    def parts():
        yield from (b"a", b"b", b"c")

    return parts()


@routes.get("/health")
def health(tenant=None):
    return "ok"


app = Flask(__name__)
app.register_blueprint(routes)
app.register_blueprint(routes, name="sub", url_prefix="/sub/<tenant>")
