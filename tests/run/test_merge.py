"""A merged model has all of what its adapter learned, in the base's precision."""

from __future__ import annotations

import shutil
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tiny import write_all
from tiny_model import make_tiny_model
from tunesmith.errors import UserError
from tunesmith.model import files, lora, lora_modules
from tunesmith.model.structure import decoder_layers
from tunesmith.run import merge
from tunesmith.run.merge import _Streamed, _Whole, merge_run
from tunesmith.run.open import open_run
from tunesmith.run.streamed import StreamedModel, _in_threads, find_weights, merged_weights, rounded


@pytest.fixture(scope="module")
def folder(runs, tiny_model, tmp_path_factory):
    """A short run over a base in bf16."""
    model = tmp_path_factory.mktemp("models") / "bf16"
    shutil.copytree(tiny_model, model)
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(model)
    folder = write_all(
        tmp_path_factory.mktemp("run"), model, method="lora", lora={"rank": 4}, steps=4, learning_rate=3e-4
    )
    ended = runs(folder, "train", "run.yaml")
    assert ended.code == 0, ended
    return folder


def test_rounding_to_bf16_keeps_what_an_adapter_adds(folder, tmp_path):
    merged = merge_run(folder / "run", tmp_path / "merged")
    assert merged.precision == "bf16"
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    adapters = lora.adapters(open_run(folder / "run", precision="fp32", storage="plain").model)
    assert len(adapters) == merged.adapters
    added = lengths = nearest = 0.0
    for name, adapter in adapters.items():
        base, delta, result = adapter.base.weight, adapter.delta(), found[f"{name}.weight"]
        assert result.dtype == torch.bfloat16
        assert ((result.float() - base - delta).abs() <= 2**-7 * (base + delta).abs()).all()  # one of the two beside it
        added += ((result.float() - base) * delta).sum().item()
        nearest += (((base + delta).bfloat16().float() - base) * delta).sum().item()
        lengths += delta.square().sum().item()
    assert added / lengths == pytest.approx(1.0, abs=0.05)
    assert nearest / lengths < 0.9  # what there is to lose


@pytest.mark.parametrize("page", [files.LARGE_PAGE, 4096])  # with small ones tensors are read and merged as large ones
def test_merging_in_pieces_by_threads_gives_the_bits_of_a_plain_merge(folder, tmp_path, monkeypatch, page):
    monkeypatch.setattr(lora_modules, "MERGED_PIECE", 640)  # several pieces, the last of them smaller
    monkeypatch.setattr(files, "LARGE_PAGE", page)
    merge_run(folder / "run", tmp_path / "merged")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    weights = find_weights(folder / "run")
    base = load_file(weights.base / "model.safetensors")
    assert found.keys() == base.keys()
    adapters = lora.adapters(open_run(folder / "run", precision="fp32", storage="plain").model)
    for name, held in base.items():
        adapter = adapters.get(name.removesuffix(".weight"))
        expected = held if adapter is None else rounded(weights, name, adapter.merged(held), torch.bfloat16)
        assert torch.equal(found[name], expected), name
        if adapter is not None:
            close = held.float() + adapter.scale * (adapter.lora_b @ adapter.lora_a)
            assert torch.allclose(adapter.merged(held), close, rtol=0, atol=1e-7), name


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_base_that_is_no_longer_finite_is_refused_with_the_tensor_and_how_many_values(
    folder, tmp_path, monkeypatch, value
):
    monkeypatch.setattr(lora_modules, "MERGED_PIECE", 640)
    monkeypatch.setattr(files, "LARGE_PAGE", 4096)
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    base = find_weights(run).base
    shutil.copytree(base, tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    broken = "model.layers.1.mlp.down_proj.weight"
    tensors[broken][3, 5] = tensors[broken][-1, -1] = float(value)
    save_file(tensors, file, metadata={"format": "pt"})
    (run / "run.json").write_text((run / "run.json").read_text().replace(str(base), str(tmp_path / "base")))
    words = f"{'NaN' if value == 'nan' else 'infinite values'} in {broken} in model.safetensors .2 of "
    with pytest.raises(UserError, match=words):
        merge_run(run, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("name", ["merged", "merged[1]"])
def test_what_a_killed_merge_has_left_is_removed_by_the_next(folder, tmp_path, monkeypatch, name):
    def killed(self, merged):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_Streamed, "prove", killed)
        patched.setattr(merge.shutil, "rmtree", lambda *_, **__: None)  # nothing tidies up after a kill
        with pytest.raises(KeyboardInterrupt):
            merge_run(folder / "run", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] != []
    merge_run(folder / "run", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_it_is_the_same_each_time(folder, tmp_path):
    for name in ("once", "again"):
        merge_run(folder / "run", tmp_path / name)
    once, again = (tmp_path / name / "model.safetensors" for name in ("once", "again"))
    assert once.read_bytes() == again.read_bytes()


def test_no_more_than_a_few_tensors_are_in_memory_while_it_is_merged(folder):
    weights = find_weights(folder / "run")
    is_small = {name for name, weight in weights.model.named_parameters() if not weight.is_meta}  # norms: ones
    alive: list[weakref.ref[torch.Tensor]] = []
    seen, most = [], 0
    for name, tensor in merged_weights(weights):
        assert not tensor.is_meta
        seen.append(name)
        alive.append(weakref.ref(tensor))
        del tensor
        most = max(most, sum(one() is not None for one in alive))
    assert seen == weights.names
    assert most <= 2
    assert all(weight.is_meta for name, weight in weights.model.named_parameters() if name not in is_small)


def test_a_streamed_model_has_the_logits_of_one_in_memory_and_holds_a_layer_at_a_time(folder):
    opened = open_run(folder / "run", precision="fp32", storage="plain")
    tokens = torch.arange(24).view(2, 12)
    streamed = StreamedModel(find_weights(folder / "run"))
    held = []
    for layer in decoder_layers(streamed.model):
        layer.register_forward_hook(
            lambda *_: held.append(sum(w.numel() for w in streamed.model.parameters() if not w.is_meta))
        )
    with torch.no_grad():
        expected = opened.model(input_ids=tokens, use_cache=False).logits
    assert torch.allclose(streamed.logits(tokens), expected, atol=1e-5)
    assert max(held) < 0.7 * sum(weight.numel() for weight in streamed.model.parameters())


PEAK = """
import sys, threading, time
from pathlib import Path
import tunesmith.run.merge, transformers.models.llama.modeling_llama
def anonymous():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) // 1024
before, peak, done = anonymous(), [0], threading.Event()
def watch():
    while not done.wait(0.005):
        peak[0] = max(peak[0], anonymous())
watching = threading.Thread(target=watch)
watching.start()
tunesmith.run.merge.merge_run(Path(sys.argv[1]), Path(sys.argv[2]))
done.set()
watching.join()
print(peak[0] - before)
"""
"""Megabytes of its own, no pages of files, that a process takes to merge."""


@pytest.mark.slow
def test_merging_takes_a_fraction_of_the_memory_of_the_model(runs, tmp_path):
    """378 MB of weights in 24 layers, merged and proved."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24, "initializer_range": 0.02}
    model = make_tiny_model(tmp_path / "model", **sizes)
    folder = write_all(tmp_path / "here", model, lora={"rank": 2, "targets": ["q_proj"]}, steps=1, eval=[])
    assert runs(folder, "train", "run.yaml").code == 0
    assert (model / "model.safetensors").stat().st_size > 370e6
    command = [sys.executable, "-c", PEAK, str(folder / "run"), str(tmp_path / "merged")]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert int(ended.stdout.split()[-1]) < 180


@pytest.fixture(scope="module")
def strong(folder, tmp_path_factory):
    """The same run with an adapter that does much more than rounding."""
    run = tmp_path_factory.mktemp("strong") / "run"
    shutil.copytree(folder / "run", run)
    file = run / "adapter" / "adapter_model.safetensors"
    factors = {name: factor * (100 if "lora_B" in name else 1) for name, factor in load_file(file).items()}
    save_file(factors, file, metadata={"format": "pt"})
    return run


def test_mergers_have_a_core_each_and_leave_the_others_to_the_rest(folder):
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        list(
            _in_threads(lambda _, tensor: seen.append(torch.get_num_threads()) or tensor, iter([("a", torch.ones(1))]))
        )
        assert seen == [1]
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as other:
            assert other.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_what_rounding_explains_is_measured_by_another_draw(strong, tmp_path, is_streamed):
    writer = _Streamed(find_weights(strong)) if is_streamed else _Whole(strong)
    writer.write(tmp_path / "merged", precision="bf16", card="", progress=None)
    difference, effect = writer.prove(tmp_path / "merged")
    explained = writer.rounding(torch.bfloat16)
    assert explained != difference  # another draw
    assert 0.5 < difference / explained < 2
    assert explained < merge.EFFECT_SHARE * effect
    assert writer.rounding(torch.float32) < 1e-5


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_merge_beyond_the_usual_bound_is_judged_by_what_rounding_does_to_this_model(
    strong, tmp_path, monkeypatch, is_faulty
):
    monkeypatch.setitem(merge.TOLERANCE, "bf16", 1e-6)
    with pytest.raises(UserError, match="more than rounding to bf16 explains"):  # whatever rounding does
        merge_run(strong, tmp_path / "merged")
    monkeypatch.setattr(merge, "LARGEST", 1e9)
    if not is_faulty:
        merge_run(strong, tmp_path / "merged")
        return
    write = _Streamed.write

    def forget_one(self, *given, **named):
        adapted, self.weights = self.weights, replace(self.weights, adapted=self.weights.adapted[1:])
        write(self, *given, **named)
        self.weights = adapted

    monkeypatch.setattr(_Streamed, "write", forget_one)
    with pytest.raises(UserError, match="more than rounding to bf16 explains"):
        merge_run(strong, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
