import asyncio

import django
import work
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.exceptions import PermissionDenied
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import include, path
from django.views.decorators.csrf import csrf_exempt

settings.configure(ALLOWED_HOSTS=["*"], DEBUG=False, ROOT_URLCONF="django_app", SECRET_KEY="x", LOGGING_CONFIG=None)


def item(request, name, tenant=None):
    return JsonResponse({"item": work.predict(name)})


@csrf_exempt
def echo(request, tenant=None):
    return HttpResponse(request.body)


def fail(request, tenant=None):
    raise ValueError("as asked")


def refuse(request, tenant=None):
    raise PermissionDenied


def stream(request, tenant=None):
    async def later():
        for part in (b"a", b"b", b"c"):
            await asyncio.sleep(0.01)
            yield part

    is_asgi = type(request).__name__ == "ASGIRequest"
    return StreamingHttpResponse(later() if is_asgi else iter((b"a", b"b", b"c")))


def health(request, tenant=None):
    return HttpResponse("ok")


routes = [
    path("items/<name>", item),
    path("echo", echo),
    path("fail", fail),
    path("refuse", refuse),
    path("stream", stream),
    path("health", health),
]
urlpatterns = [*routes, path("sub/<tenant>/", include(routes))]
django.setup()
app = get_asgi_application()
wsgi = get_wsgi_application()
