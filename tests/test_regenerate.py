"""The corpus is what its generator makes, on every kind of machine, and it does not change silently."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from statescan.goldens import needs, regenerate, store

CONTROL = """
import numpy as np, hashlib
x = -np.abs(np.random.default_rng(1).normal(0, 3, 200000))
print(hashlib.sha256(np.exp(x).tobytes()).hexdigest())
"""


def test_the_stored_corpus_is_the_computed_one():
    assert regenerate.check() == []


def test_every_dispatch_setting_gives_the_same_digests():
    assert regenerate.check_dispatch() == []


def test_the_negative_control_is_caught():
    """A generator that called numpy.exp would give other digests where the CPU has AVX-512: the check can fail."""
    settings = regenerate.dispatch_settings()
    if not settings["no AVX-512"]["NPY_DISABLE_CPU_FEATURES"]:
        pytest.skip("NumPy dispatches no AVX-512 feature on this machine")
    found = {name: regenerate.run_under(env, CONTROL).strip() for name, env in settings.items()}
    assert len(set(found.values())) > 1, found


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Two vectors in a folder of their own."""
    folder = tmp_path / "vectors"
    for key in ("conv-taps-newest-last", "seq-idx-of-the-seed"):
        (path,) = store.VECTORS.glob(f"*/{key}.json")
        (folder / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / path.parent.name)
    monkeypatch.setattr(regenerate, "VECTORS", folder)
    monkeypatch.setattr(regenerate, "MANIFEST", tmp_path / "MANIFEST.json")
    monkeypatch.setattr(regenerate, "save_vector", lambda vector: store.save_vector(vector, folder))
    monkeypatch.setattr(regenerate, "load_vectors", lambda: store.load_vectors(folder))
    monkeypatch.setattr(regenerate, "load_corpus", lambda: store.load_corpus(folder))
    monkeypatch.setattr(regenerate, "load_traces", lambda: store.load_traces(folder))
    monkeypatch.setattr(regenerate, "_sweep_blobs", lambda vectors: None)
    return folder


def test_writing_what_is_there_changes_nothing(corpus):
    before = {path: path.read_bytes() for path in corpus.glob("*/*.json")}
    assert regenerate.write(None, lambda line: None) == []
    assert {path: path.read_bytes() for path in corpus.glob("*/*.json")} == before


def test_a_changed_expectation_is_refused_and_left_beside(corpus):
    path = corpus / "conv" / "conv-taps-newest-last.json"
    vector = json.loads(path.read_text())
    vector["inputs"]["x"]["data"][0] += 1
    path.write_text(json.dumps(vector))
    (refused,) = regenerate.write(None, lambda line: None)
    assert "y changed" in refused
    assert "ulps" in refused
    assert path.with_suffix(".rej").exists()
    assert json.loads(path.read_text()) == vector
    said = []
    assert regenerate.write("the first token is another one", said.append) == []
    assert any("y changed" in line for line in said)


def test_two_definitions_that_differ_stop_the_writing(corpus, monkeypatch):
    def other(story):
        return {name: array + 1 for name, array in regenerate.oracle.first(story)[0].items()}

    monkeypatch.setattr(regenerate.oracle, "second", other)
    with pytest.raises(regenerate.DisagreementError, match="two definitions"):
        regenerate.write(None, lambda line: None)


def test_a_vector_that_a_right_model_fails_is_refused():
    corpus = store.load_vectors()
    vector = json.loads(json.dumps(corpus["conv-taps-newest-last"]))
    vector["expect"]["y"]["data"][0] += 1
    with pytest.raises(regenerate.DisagreementError, match="model fails it"):
        regenerate.kills(vector, corpus)


def test_gain_codes_bound_their_gain():
    gain = np.concatenate([[0.0], np.exp2(np.linspace(-20, 20, 401)), np.random.default_rng(0).lognormal(0, 5, 300)])
    code = regenerate.gains.__globals__["encode"](gain)
    bound = np.where(code == -128, 0, np.exp2(code / 2))
    assert (bound >= gain * (1 - 1e-15)).all()
    assert (bound[1:] <= gain[1:] * 2**0.5 * (1 + 1e-15)).all()


def test_what_a_relation_does_to_its_calls_is_needed():
    """Strides too, where a call takes tensors from another call of the same vector."""
    strided = [v for v in store.load_vectors().values() if any(c.get("strided") for c in v.get("calls", {}).values())]
    assert any(c.get("strided") and "from" in str(c.get("inputs")) for v in strided for c in v["calls"].values())
    for vector in strided:
        also = [word for words in vector["needs"].get("also", {}).values() for word in words]
        assert "strided" in [*vector["needs"]["features"], *also], vector["id"]


@pytest.mark.parametrize(("first", "activation", "gated", "words"), [
    (True, "sigmoid", True, ["gate.sigmoid"]), (False, "sigmoid", True, ["gate.sigmoid.first"]),
    (True, "silu", True, []), (True, "sigmoid", False, []),
])  # fmt: skip
def test_a_sigmoid_gate_is_a_word_of_its_own(first, activation, gated, words):
    tensors = {"x": np.ones((1, 1, 4), np.float32)}
    tensors |= {"z": tensors["x"]} if gated else {}
    args = {"norm_before_gate": first, "gate_activation": activation}
    assert needs.features("rmsnorm_gated", args, tensors, {"y"}, {"D": 4}, grad=False) == words
