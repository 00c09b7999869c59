import sys

from flask_app import app

server, port = sys.argv[1], int(sys.argv[2])
if server == "waitress":
    from waitress import serve

    serve(app, host="127.0.0.1", port=port, threads=2)
elif server == "gevent":
    from gevent.pywsgi import WSGIServer

    WSGIServer(("127.0.0.1", port), app, log=None).serve_forever()
elif server == "cheroot":
    from cheroot.wsgi import Server

    Server(("127.0.0.1", port), app).safe_start()
