"""transformers and sentence-transformers: models with random weights, recorded and otherwise as they were."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from readback import spans_in
from trees import outline, tree

from instrument.instrumentors.selection import Selection
from instrument.recorder.recorder import Recorder

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@pytest.fixture(scope="module", autouse=True)
def late_imports() -> None:
    """Imported by the first test: this file is collected by every process of the tests and run by one."""
    global torch, transformers, tokenizers, GenerationMixin, Pipeline
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from transformers.generation.utils import GenerationMixin
    from transformers.pipelines.base import Pipeline


def text(span: Any) -> str:
    return f"{span.site.name} {span.site.instance}" + (f" !{span.error}" if span.error else "")


def tokenizer() -> Any:
    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "a", "b", "c", "d"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=6, num_key_value_heads=2, pad_token_id=0, eos_token_id=None, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def encoder() -> Any:
    """A sentence encoder of one tiny layer."""
    st = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)

    class Embedding(torch.nn.Module):
        """Words by their length, which needs no files."""

        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(10, 4)

        def tokenize(self, texts: list[str], **options: Any) -> dict[str, Any]:
            return {"lengths": torch.tensor([len(text) % 10 for text in texts])}

        preprocess = tokenize

        def forward(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
            features["sentence_embedding"] = self.table(features["lengths"])
            return features

    return st.SentenceTransformer(modules=[Embedding()], device="cpu")


def test_generate_is_named_by_the_class_of_the_model(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    model, ids = llama(), torch.tensor([[2, 3]])
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    select("{frameworks: [transformers], layers: [{type: LlamaMLP}]}")
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)
    assert tree(recorder, text) == outline(
        """
        transformers.generate LlamaForCausalLM
          LlamaMLP model.layers.0.mlp
          LlamaMLP model.layers.0.mlp
          LlamaMLP model.layers.0.mlp
        """
    )
    site = next(span.site for span in spans_in(recorder) if not span.parent_id)
    assert (site.kind, site.qualname) == ("op", "GenerationMixin.generate")
    assert site.file.endswith("generation/utils.py")


def test_a_pipeline_is_named_by_its_task_and_holds_what_it_calls(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    pipeline = transformers.pipeline("text-generation", model=llama(), tokenizer=tokenizer())
    options = {"max_new_tokens": 2, "do_sample": False}
    expected = pipeline("a b", **options)
    select("frameworks: [transformers]")
    assert pipeline("a b", **options) == expected
    assert tree(recorder, text) == outline(
        """
        transformers.pipeline text-generation
          transformers.generate LlamaForCausalLM
        """
    )


def test_a_pipeline_over_a_generator_returns_at_once_and_its_work_records_as_it_is_read(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    pipeline = transformers.pipeline("text-generation", model=llama(), tokenizer=tokenizer())
    select("frameworks: [transformers]")
    results = pipeline((word for word in ("a", "b")), max_new_tokens=1)
    assert len(list(results)) == 2
    assert tree(recorder).split("\n") == ["transformers.pipeline", *["transformers.generate"] * 2]


def test_sentences_are_encoded_as_before(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    model = encoder()
    expected = model.encode(["a", "bcd"])
    select("frameworks: [sentence_transformers]")
    assert (model.encode(["a", "bcd"]) == expected).all()
    assert tree(recorder, text) == "sentence_transformers.encode SentenceTransformer"
    assert spans_in(recorder)[0].site.line > 0


def test_an_error_passes_and_marks_the_span(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    select("frameworks: [transformers]")
    with pytest.raises(ValueError, match="max_new_tokens"):
        llama().generate(torch.tensor([[2]]), max_new_tokens=-1)
    assert tree(recorder) == "transformers.generate !ValueError"


def test_undo_restores_the_very_same_methods_and_signatures_and_pickles_never_change(
    select: Callable[[str], Selection],
) -> None:
    model = llama()
    before = vars(GenerationMixin)["generate"], vars(Pipeline)["__call__"], inspect.signature(GenerationMixin.generate)
    shown = repr(model.generate), len(pickle.dumps(model))
    selection = select("frameworks: auto")
    assert vars(GenerationMixin)["generate"] is not before[0]
    assert inspect.signature(GenerationMixin.generate) == before[2]
    assert (repr(model.generate), len(pickle.dumps(model))) == shown
    assert model.can_generate()
    selection.detach_all()
    assert (vars(GenerationMixin)["generate"], vars(Pipeline)["__call__"]) == before[:2]


def test_packages_that_are_not_imported_are_named_if_the_profile_names_them(
    select: Callable[[str], Selection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(__import__("sys").modules, "transformers.pipelines.base")
    texts = [str(verdict) for verdict in select("frameworks: [transformers]").verdicts()]
    assert texts == [
        "transformers: GenerationMixin.generate: attached",
        "transformers: waiting (transformers.pipelines.base not imported)",
    ]
