import asyncio

import work
from fastapi import APIRouter, BackgroundTasks, FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse

router = APIRouter()


@router.get("/items/{name}")
async def item(name: str):
    return {"item": work.predict(name)}


@router.post("/echo")
async def echo(request: Request):
    return Response(await request.body())


@router.get("/fail")
def fail():
    raise ValueError("as asked")


@router.get("/refuse")
async def refuse():
    raise HTTPException(403)


@router.get("/stream")
async def stream():
    async def parts():
        for part in ("a", "b", "c"):
            await asyncio.sleep(0.01)
            yield f"data: {part}\n\n"

    return StreamingResponse(parts(), media_type="text/event-stream")


@router.get("/later")
async def later(tasks: BackgroundTasks):
    tasks.add_task(work.after)
    return "now"


@router.get("/health")
async def health():
    return "ok"


sub = FastAPI()
sub.include_router(router)
app = FastAPI()
app.include_router(router)
app.include_router(router, prefix="/sub/{tenant}")
app.mount("/mounted", sub)
