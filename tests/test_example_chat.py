"""The example service by itself, without instrumentation: what it promises must hold before anything is measured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from chat.text import END, VOCABULARY, decode, decode_next, encode  # noqa: E402

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(EXAMPLES)}


@pytest.fixture(scope="module", autouse=True)
def late_imports() -> None:
    """Imported by the first test: this file is collected by every process of the tests and run by one."""
    global httpx, torch, Engine, EngineBusyError, Generation, make_request, ChatModel, Size, make_cache, CPU
    global load_weights, make_weights, save_weights
    for name in ("torch", "httpx", "starlette", "uvicorn"):
        pytest.importorskip(name)
    import httpx
    import torch
    from chat.engine import Engine, EngineBusyError, Generation
    from chat.load import make_request
    from chat.model import ChatModel, Size, make_cache
    from chat.weights import load_weights, make_weights, save_weights

    CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> ChatModel:
    model = ChatModel(Size()).eval()
    model.load_state_dict(make_weights(Size()))
    return model


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def start_server(*options: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "chat.server", "--port", "0", *options]
    server = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line.startswith("listening on "):
        server.kill()
        pytest.fail(f"the server did not start: {line}{server.communicate()[1]}")
    return server, line.removeprefix("listening on ").strip()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server, url = start_server()
    yield url
    server.kill()
    server.communicate()


def answer(url: str, fields: dict[str, object]) -> bytes:
    response = httpx.post(f"{url}/generate", json=fields, timeout=240, trust_env=False)
    assert response.status_code == 200
    content: bytes = response.content
    return content


@given(st.text())
def test_a_text_survives_its_tokens(text: str) -> None:
    tokens = encode(text)
    assert decode(tokens) == text
    assert all(0 <= token < END for token in tokens)


@given(st.lists(st.integers(0, VOCABULARY - 1).filter(lambda token: token != END)))
def test_a_text_decoded_token_by_token_is_the_text_decoded_at_once(tokens: list[int]) -> None:
    pending, pieces = b"", []
    for token in [*tokens, END]:
        piece, pending = decode_next(pending, token)
        pieces.append(piece)
    assert "".join(pieces) == decode(tokens)


def test_whole_words_are_one_token() -> None:
    assert len(encode(" the memory of the device")) == 5


def test_the_same_seed_gives_the_same_file_of_weights(tmp_path: Path) -> None:
    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    save_weights(first, make_weights(Size()))
    save_weights(second, make_weights(Size()))
    assert first.read_bytes() == second.read_bytes()
    assert make_weights(Size()).keys() == load_weights(first).keys()
    assert not torch.equal(make_weights(Size(), 1)["lm_head.weight"], load_weights(first)["lm_head.weight"])


def test_the_module_tree_has_the_paths_that_the_profile_names(model: ChatModel) -> None:
    paths = {path for path, _ in model.named_modules()}
    assert {f"model.layers.{n}.{part}" for n in range(4) for part in ("attention", "mlp")} <= paths


@pytest.mark.usefixtures("without_gradients")
def test_decoding_with_the_cache_gives_the_scores_of_a_whole_pass(model: ChatModel) -> None:
    tokens = torch.tensor([encode("Tell me about the sea and the night train")])
    positions = torch.arange(tokens.shape[1])[None]
    whole = model(tokens, positions)
    cache = make_cache(model.size, 1, CPU)
    prompt = model(tokens[:, :5], positions[:, :5], cache)
    steps = [model(tokens[:, at : at + 1], positions[:, at : at + 1], cache) for at in range(5, tokens.shape[1])]
    torch.testing.assert_close(torch.cat([prompt, *steps], dim=1), whole, rtol=0, atol=1e-10)


def scores_of_slot(model: ChatModel, slot: int, company: int) -> torch.Tensor:
    """Scores of 40 decoded tokens in one of 16 slots, the other slots filled with sequences of the seed `company`."""
    generator = torch.Generator().manual_seed(company)
    cache = make_cache(model.size, 16, CPU)
    tokens = torch.randint(END, (16, 1), generator=generator)
    positions = torch.randint(model.size.length - 40, (16, 1), generator=generator)
    for layer in cache:
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
    prompt = torch.tensor([encode("Tell me about the sea")])
    model(prompt, torch.arange(prompt.shape[1])[None], [layer.slot(slot) for layer in cache])
    positions[slot], tokens[slot] = prompt.shape[1], 300
    seen = []
    for _ in range(40):
        scores = model(tokens, positions, cache)[:, -1]
        seen.append(scores[slot])
        tokens, positions = scores.argmax(1, keepdim=True), positions + 1
    return torch.stack(seen)


@pytest.mark.usefixtures("without_gradients")
@pytest.mark.slow
def test_slot_and_company_change_scores_far_less_than_two_tokens_differ(model: ChatModel) -> None:
    alone = scores_of_slot(model, 3, company=1)
    best, second = alone.topk(2).values.unbind(1)
    margin = (best - second).min()
    for slot in (0, 7, 15):
        change = (scores_of_slot(model, slot, company=slot + 2) - alone).abs().max()
        assert 1e6 * change < margin


def run_in_engine(engine: Engine, prompts: list[str]) -> list[Generation]:
    async def submit_all() -> list[Generation]:
        generations = [engine.submit(prompt, encode(prompt), 64) for prompt in prompts]
        engine.cancel(generations[0])
        engine.stop()
        for generation in generations:
            while await generation.tokens.get() is not None:
                pass
        return generations

    engine.start()
    return asyncio.run(submit_all())


def test_an_engine_that_stops_ends_every_open_request(model: ChatModel) -> None:
    generations = run_in_engine(Engine(model, slots=1), ["the sea", "the night", "the train"])
    assert all(generation.finish in ("cancelled", "stopped") for generation in generations)


def test_a_full_queue_and_a_stopped_engine_accept_nothing(model: ChatModel) -> None:
    async def submit() -> None:
        with pytest.raises(EngineBusyError):
            engine.submit("one", [1], 1)

    engine = Engine(model, slots=1, waiting=0)
    asyncio.run(submit())
    engine.start()
    asyncio.run(submit())
    engine.stop()
    asyncio.run(submit())


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(
    model: ChatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, slots=2)
    forward = engine.forward

    def fail_once(*arguments: object) -> torch.Tensor:
        monkeypatch.setattr(engine, "forward", forward)
        raise RuntimeError("out of memory")

    async def finish_of_one() -> str | None:
        generation = engine.submit("one", encode("the sea"), 2)
        while await generation.tokens.get() is not None:
            pass
        return generation.finish

    monkeypatch.setattr(engine, "forward", fail_once)
    engine.start()
    try:
        assert asyncio.run(finish_of_one()) == "failed"
        assert asyncio.run(finish_of_one()) == "length"
    finally:
        engine.stop()


@pytest.mark.slow
def test_answers_under_concurrency_are_byte_for_byte_those_given_one_at_a_time(url: str) -> None:
    requests = [make_request(number) for number in range(60)]
    one_at_a_time = [answer(url, fields) for fields in requests]
    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(lambda fields: answer(url, fields), reversed(requests)))
    assert together[::-1] == one_at_a_time
    assert len(set(one_at_a_time)) > 30


@pytest.mark.slow
def test_a_seed_draws_and_the_same_seed_draws_the_same(url: str) -> None:
    ask = {"prompt": "Tell me about the sea", "max_tokens": 24}
    greedy, first, second = ({**ask, **more} for more in ({}, {"seed": 1}, {"seed": 2}))
    assert answer(url, first) == answer(url, first)
    assert len({answer(url, greedy), answer(url, first), answer(url, second)}) == 3


def test_a_streamed_answer_comes_in_pieces_and_says_the_same_as_a_whole_one(url: str) -> None:
    ask = {"prompt": "Write one line about winter", "max_tokens": 30, "seed": 5}
    with httpx.stream(
        "POST", f"{url}/generate", json={**ask, "stream": True}, timeout=240, trust_env=False
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = list(response.iter_raw())
    assert len(chunks) > 1
    events = [json.loads(line.removeprefix("data: ")) for line in b"".join(chunks).decode().split("\n\n") if line]
    whole = json.loads(answer(url, ask))
    assert "".join(event["text"] for event in events) == whole["text"]
    assert events[-1] == {"text": "", "tokens": whole["tokens"], "finish": whole["finish"]}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "prompt"),
        (b'{"prompt": ""}', "prompt"),
        (b'{"prompt": 7}', "prompt"),
        (b'{"prompt": "\\ud800"}', "not Unicode"),
        (b'{"prompt": "x", "max_tokens": 0}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": 65}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": true}', "max_tokens"),
        (b'{"prompt": "x", "seed": -1}', "seed"),
        (b'{"prompt": "x", "stream": "yes"}', "stream"),
        (b'{"prompt": "x", "promt": "y"}', "'promt'"),
        (b'{"prompt": "' + b"x" * 160 + b'"}', "160 tokens"),
        (b'{"prompt": "' + b"x" * 70_000 + b'"}', "longer than"),
    ],
)
def test_bad_input_is_answered_with_400_and_the_reason(url: str, body: bytes, reason: str) -> None:
    response = httpx.post(f"{url}/generate", content=body, timeout=240, trust_env=False)
    assert response.status_code == 400
    assert reason in response.json()["error"]


def test_health_says_ok_and_other_paths_and_methods_are_refused(url: str) -> None:
    assert httpx.get(f"{url}/health", trust_env=False).json()["status"] == "ok"
    assert httpx.get(f"{url}/generate", trust_env=False).status_code == 405
    assert httpx.get(f"{url}/nothing", trust_env=False).status_code == 404


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "code"),
    [(signal.SIGTERM, -signal.SIGTERM), pytest.param(signal.SIGINT, 0, marks=pytest.mark.slow)],
)
def test_a_signal_lets_open_requests_finish_and_ends_the_server(stop: signal.Signals, code: int) -> None:
    server, url = start_server("--slots", "1")
    ask = {"prompt": "Tell me about music", "max_tokens": 64, "stream": True, "seed": 3}
    with httpx.stream("POST", f"{url}/generate", json=ask, timeout=240, trust_env=False) as response:
        chunks = response.iter_text()
        text = next(chunks)
        server.send_signal(stop)
        text += "".join(chunks)
    assert json.loads(text.rpartition("data: ")[2])["finish"] in ("end", "length")
    out, err = server.communicate(timeout=240)
    assert (server.returncode, out, err) == (code, "", "")


@pytest.mark.slow
def test_the_demo_runs_server_and_load_and_ends_well(tmp_path: Path) -> None:
    weights, answers = tmp_path / "weights.pt", tmp_path / "answers.json"
    made = subprocess.run(
        [sys.executable, "-m", "chat.weights", str(weights)], env=ENVIRONMENT, timeout=240, check=False
    )
    assert made.returncode == 0
    demo = [sys.executable, "-m", "chat.demo", "--requests", "40"]
    first = subprocess.run(
        [*demo, "--save", str(answers)], env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False
    )
    assert first.returncode == 0, first.stderr
    assert "errors" in first.stdout
    server = [sys.executable, "-m", "chat.server", "--port", "0", "--slots", "3", "--weights", str(weights)]
    server += ["--engine-process"]
    check = [*demo, "--concurrency", "2", "--signal", "SIGTERM", "--check", str(answers), "--", *server]
    second = subprocess.run(check, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert second.returncode == 0, second.stderr


@pytest.mark.slow
def test_requests_fail_and_others_are_refused_where_the_engines_process_was_killed() -> None:
    ask = {"prompt": "Tell me about music", "max_tokens": 64, "stream": True, "seed": 3}
    for _ in range(10):
        server, url = start_server("--engine-process")
        with httpx.stream("POST", f"{url}/generate", json=ask, timeout=240, trust_env=False) as response:
            chunks = response.iter_text()
            text = next(chunks)
            for child in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(int(child), signal.SIGKILL)
            text += "".join(chunks)
        finish = json.loads(text.rpartition("data: ")[2])["finish"]
        if finish == "failed":
            break
        server.kill()  # its engine had done the work before it was killed
        server.communicate()
    assert finish == "failed"
    assert httpx.post(f"{url}/generate", json={"prompt": "x"}, trust_env=False).status_code == 503
    server.send_signal(signal.SIGTERM)
    assert server.communicate(timeout=240) == ("", "")


def test_the_demo_fails_when_the_server_does_not_start() -> None:
    demo = [sys.executable, "-m", "chat.demo", "--", sys.executable, "-c", "raise SystemExit(3)"]
    done = subprocess.run(demo, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert "server exit code 3" in done.stderr
