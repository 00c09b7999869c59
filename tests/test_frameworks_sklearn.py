"""scikit-learn: real estimators, whose outermost calls record and which notice nothing."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from readback import spans_in
from trees import outline, tree

from instrument.instrumentors.jax_keras_sklearn import SKLEARN_METHODS
from instrument.instrumentors.lineages import all_subclasses
from instrument.instrumentors.selection import Selection
from instrument.recorder.recorder import Recorder
from instrument.runtime.faults import FAULTS


@pytest.fixture(scope="module", autouse=True)
def late_imports() -> None:
    """Imported by the first test: this file is collected by every process of the tests and run by one."""
    global np, sklearn, X, Y, ALL, BaseEstimator, TransformerMixin, clone, RandomForestClassifier, VotingClassifier
    global LinearRegression, LogisticRegression, Pipeline, make_pipeline, StandardScaler
    np = pytest.importorskip("numpy")
    sklearn = pytest.importorskip("sklearn")
    from sklearn.base import BaseEstimator, TransformerMixin, clone
    from sklearn.ensemble import RandomForestClassifier, VotingClassifier
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.pipeline import Pipeline, make_pipeline
    from sklearn.preprocessing import StandardScaler

    X = np.random.default_rng(0).normal(size=(20, 3))
    Y = (X[:, 0] > 0).astype(int)
    classes = [BaseEstimator, TransformerMixin, *TransformerMixin.__mro__, *all_subclasses(BaseEstimator)]
    ALL = list(dict.fromkeys(base for cls in classes for base in cls.__mro__))


def methods() -> dict[Any, Any]:
    """Everything that could be replaced in any class."""
    return {(c, n): vars(c)[n] for c in ALL for n in (*SKLEARN_METHODS, "__init_subclass__") if n in vars(c)}


def test_a_pipeline_shows_its_steps_as_children(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, Y)
    expected = model.predict(X), model.predict_proba(X), model.decision_function(X)
    select("frameworks: [sklearn]")
    assert np.array_equal(model.predict(X), expected[0])
    assert np.array_equal(model.predict_proba(X), expected[1])
    assert np.array_equal(model.decision_function(X), expected[2])
    assert tree(recorder) == outline(
        """
        Pipeline.predict
          StandardScaler.transform
          LogisticRegression.predict
        Pipeline.predict_proba
          StandardScaler.transform
          LogisticRegression.predict_proba
        Pipeline.decision_function
          StandardScaler.transform
          LogisticRegression.decision_function
        """
    )
    site = next(span.site for span in spans_in(recorder) if span.site.name == "LogisticRegression.predict_proba")
    assert (site.kind, site.module, site.qualname) == (
        "op",
        "sklearn.linear_model._logistic",
        "LogisticRegression.predict_proba",
    )
    assert site.line > 0


def test_the_estimators_of_an_ensemble_are_its_children(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    members = [("a", LogisticRegression()), ("b", RandomForestClassifier(2, random_state=0))]
    model = VotingClassifier(members, voting="hard").fit(X, Y)
    select("frameworks: [sklearn]")
    model.predict(X)
    lines = tree(recorder).split("\n")
    assert lines[:3] == ["VotingClassifier.predict", "  LogisticRegression.predict", "  RandomForestClassifier.predict"]


def test_estimator_classes_of_the_host_are_seen_whenever_they_are_defined(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    class Early(BaseEstimator):
        def predict(self, X: Any) -> Any:
            return self.decision_function(X) > 0

        def decision_function(self, X: Any) -> Any:
            return X[:, 0]

    selection = select("frameworks: [sklearn]")

    class Late(TransformerMixin, BaseEstimator):
        def fit(self, X: Any, y: Any = None) -> Any:
            self.n_features_in_ = X.shape[1]
            return self

        def transform(self, X: Any) -> Any:
            return X + 1

        def get_feature_names_out(self, names: Any = None) -> Any:
            return [f"late{i}" for i in range(self.n_features_in_)]

    class Turned(BaseEstimator, TransformerMixin):
        def transform(self, X: Any) -> Any:
            return X

    class Derived(Late):
        def transform(self, X: Any) -> Any:
            return super().transform(X) * 2

    Early().predict(X)
    assert np.array_equal(Late().fit(X).transform(X), X + 1)
    Turned().transform(X)
    assert np.array_equal(Derived().fit(X).transform(X), (X + 1) * 2)
    assert tree(recorder) == "Early.predict\nLate.transform\nTurned.transform\nDerived.transform"
    selection.detach_all()
    for cls in (Early, Late, Turned, Derived):
        for name in SKLEARN_METHODS:
            assert not hasattr(vars(cls).get(name), "__instrument_framework__")
    assert np.array_equal(Derived().fit(X).transform(X), (X + 1) * 2)


def test_a_method_that_an_estimator_does_not_offer_is_still_not_there(select: Callable[[str], Selection]) -> None:
    model = make_pipeline(StandardScaler(), LinearRegression()).fit(X, Y)
    message = "This 'Pipeline' has no attribute 'predict_proba'"
    select("frameworks: [sklearn]")
    assert not hasattr(model, "predict_proba")
    with pytest.raises(AttributeError, match=message):
        model.predict_proba(X)


def test_signatures_clones_pickles_and_metadata_requests_stay_as_they_were(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.5)).fit(X, Y)
    classes = [Pipeline, StandardScaler, LogisticRegression, RandomForestClassifier]
    offered = [(cls, name) for cls in classes for name in SKLEARN_METHODS if hasattr(cls, name)]
    before = {(cls, name): inspect.signature(getattr(cls, name)) for cls, name in offered}
    parameters = inspect.signature(LogisticRegression), model.get_params(), pickle.dumps(model)
    requests = [repr(cls.__new__(cls).get_metadata_routing()) for cls in (StandardScaler, LogisticRegression)]
    select("frameworks: [sklearn]")
    assert {(cls, name): inspect.signature(getattr(cls, name)) for cls, name in offered} == before
    assert inspect.isfunction(LogisticRegression.predict)
    assert inspect.signature(LogisticRegression) == parameters[0]
    assert repr(model.get_params()) == repr(parameters[1])
    assert pickle.dumps(model) == parameters[2]
    assert [repr(cls.__new__(cls).get_metadata_routing()) for cls in (StandardScaler, LogisticRegression)] == requests
    twin = pickle.loads(pickle.dumps(clone(model).fit(X, Y)))
    assert np.array_equal(twin.predict(X), model.predict(X))
    assert tree(recorder).count("Pipeline.predict") == 2


def test_undo_restores_the_very_same_methods_of_every_class(select: Callable[[str], Selection]) -> None:
    before = methods()
    selection = select("frameworks: [sklearn]")
    changed = [place for place, method in methods().items() if before.get(place) is not method]
    assert len(changed) > 100
    selection.detach_all()
    after = methods()
    assert after.keys() == before.keys()
    assert all(after[place] is before[place] for place in before)


def test_an_exception_passes_marks_the_span_and_the_next_call_records_again(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    select("frameworks: [sklearn]")
    model = LogisticRegression()
    with pytest.raises(sklearn.exceptions.NotFittedError):
        model.predict_proba(X)
    model.fit(X, Y).predict_proba(X)
    assert tree(recorder).split("\n") == [
        "LogisticRegression.predict_proba !NotFittedError",
        "LogisticRegression.predict_proba",
    ]


def test_other_objects_than_functions_are_named_and_left_alone(select: Callable[[str], Selection]) -> None:
    class Odd(BaseEstimator):
        predict = len
        transform = None

    selection = select("frameworks: [sklearn]")
    assert vars(Odd)["predict"] is len
    texts = [str(verdict) for verdict in selection.verdicts()]
    assert any(text.startswith("sklearn: ") and "Odd.predict: unreachable (it is a built" in text for text in texts)


def test_a_fault_of_ours_does_not_reach_the_definition_of_an_estimator(
    select: Callable[[str], Selection], monkeypatch: pytest.MonkeyPatch
) -> None:
    selection = select("frameworks: [sklearn]")

    def fail(cls: type[Any]) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(selection._families["frameworks"].observers[-1], "_attach_class", fail)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")

    class Odd(BaseEstimator):
        pass

    assert FAULTS.count_by_place() == {"definition of an estimator class": 1}
    FAULTS.clear()
