"""The cost of layers with device time in a model that decodes: `python tests/bench/decoding.py`.

A Llama of 16 layers with random weights decodes for four sequences, bare and with a profile. The profile selects the
blocks, every linear layer, or every linear layer on the host alone. Bare and profiled runs take turns. Without a CUDA
device the numbers are host times.

On an H200 (torch 2.11, 16 cores of a virtual machine) a token took 20.3 ms bare and 24.9 with 16 blocks timed. It took
19.8 and 25.3 with 113 linear layers, and no more with host times alone. The resolver looked every 5 ms then, and each
look cost a millisecond for any number of timed layers. It looks every 50 ms now, which is not measured there yet.
"""

from __future__ import annotations

import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import instrument
from instrument.profile.keys import loads

TOKENS, ROUNDS = 48, 4
QUIET = "\ndevice: {nvml: off, host: off}"
PROFILES = {
    "blocks": 'layers: [{match: "model.layers.*", device: true}]',
    "linear layers": "layers: [{type: [Linear], device: true}]",
    "linear layers, host alone": "layers: [{type: [Linear]}]",
}


def main() -> None:
    """Print a row for each profile."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=8192,
    )
    model = LlamaForCausalLM(config).to(device, torch.float16 if device == "cuda" else torch.float32).eval()
    prompt = torch.ones(4, 32, dtype=torch.long, device=device)

    def token_ms(tokens: int = TOKENS) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        begin_ns = time.perf_counter_ns()
        with torch.no_grad():
            model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter_ns() - begin_ns) / tokens / 1e6

    token_ms(8)
    print(f"torch {torch.__version__} on {device}")
    print(f"{'':<28}{'bare, ms a token':>18}{'on':>10}{'pairs a token':>16}{'resolver, us a pair':>22}")
    for name, text in PROFILES.items():
        bare, on, pairs, resolver_us = [], [], 0.0, 0.0
        for _ in range(ROUNDS):
            bare.append(token_ms())
            session = instrument.start(loads(text + QUIET))
            assert session is not None
            token_ms(8)
            timer = session.recorded.timing.timer if session.recorded.timing is not None else None
            before = (timer.resolver.pairs, timer.resolver.thread_ns) if timer is not None else (0, 0)
            on.append(token_ms())
            if timer is not None:
                time.sleep(0.3)  # so that all is resolved
                count = timer.resolver.pairs - before[0]
                pairs, resolver_us = count / TOKENS, (timer.resolver.thread_ns - before[1]) / max(count, 1) / 1e3
            instrument.stop()
        print(
            f"{name:<28}{statistics.median(bare):>18.2f}{statistics.median(on):>10.2f}{pairs:>16.1f}{resolver_us:>22.1f}"
        )


if __name__ == "__main__":
    main()
