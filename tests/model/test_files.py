"""Models are read from their files as transformers would: experts held one by one, and attention of their own."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BloomConfig, Gemma2Config, MixtralConfig, Qwen3MoeConfig

from families import tiny_model
from tunesmith.checkpoint.codec import ShardSlice
from tunesmith.checkpoint.result import stored_parts
from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.model import files, load
from tunesmith.model.content import Content
from tunesmith.model.files import read_ahead
from tunesmith.model.source import files_of
from tunesmith.parallel.prepare import load_model

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURES = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "qwen": Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}


@pytest.fixture(params=MIXTURES)
def mixture(request, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MIXTURES[request.param]).save_pretrained(tmp_path)
    assert any(".experts.3." in name for name in load_file(tmp_path / "model.safetensors"))
    return tmp_path


def test_experts_stored_one_by_one_are_stacked_as_transformers_does(mixture, monkeypatch):
    expected = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).state_dict()
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    found = load_model(Run(model=str(mixture), data="none.jsonl"), dtype="fp32", device="cpu").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_part_of_a_stack_is_read_from_its_own_experts_only(mixture, monkeypatch):
    model, folder = load.load_empty(Run(model=str(mixture), data="none.jsonl"), dtype="fp32")
    held = files.find(files.read_tensors(folder), model.state_dict())
    stacks = {name: one for name, one in held.items() if isinstance(one, files.Stack)}
    assert len(stacks) == 4
    read = []
    real = files.Tensor.read
    monkeypatch.setattr(files.Tensor, "read", lambda self, *more: read.append(self.name) or real(self, *more))
    whole = {name: tensor for name, tensor, _ in files.read_ahead(stacks, pin=False)}
    read.clear()
    for name, tensor, shape in files.read_ahead(stacks, pin=False, part=lambda *_: (slice(1, 3),)):
        assert shape == whole[name].shape
        assert torch.equal(tensor, whole[name][1:3])
    assert {name.split(".experts.")[1][0] for name in read} == {"1", "2"}


def test_files_with_experts_missing_are_left_to_transformers(mixture):
    tensors = load_file(mixture / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if ".experts.2." not in name}, mixture / "model.safetensors")
    model, folder = load.load_empty(Run(model=str(mixture), data="none.jsonl"), dtype="fp32")
    assert files.find(files.read_tensors(folder), model.state_dict()) is None


def test_files_of_another_size_are_left_to_transformers_which_refuses_them(mixture):
    tensors = load_file(mixture / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:90].clone()
    save_file(tensors, mixture / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="could not be loaded"):
        load_model(Run(model=str(mixture), data="none.jsonl"), dtype="fp32", device="cpu")


@pytest.mark.parametrize(
    "config",
    [Gemma2Config(**SMALL), BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=100)],
    ids=["gemma2", "bloom"],
)
def test_models_that_cannot_use_the_usual_attention_are_loaded_with_their_own(tmp_path, config):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(Run(model=str(tmp_path), data="none.jsonl"), dtype="fp32", device="cpu")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(0, 8), (3, 5), (700, 300)])
def test_a_copy_that_stays_is_contiguous_and_takes_no_more_room_than_its_values(dtype, shape):
    whole = torch.arange(2 * shape[0] * shape[1]).view(shape[0], 2 * shape[1]).to(dtype)
    part = whole[:, shape[1] :]
    copy = files.own_copy(part)
    assert torch.equal(copy, part)
    assert copy.dtype == dtype
    assert copy.is_contiguous()
    assert copy.untyped_storage().nbytes() == part.numel() * part.element_size()
    copy.zero_()
    assert torch.equal(part, whole[:, shape[1] :])


@pytest.fixture
def small_pages(monkeypatch):
    """So that tensors of tests are as large as those which go past the page cache."""
    monkeypatch.setattr(files, "LARGE_PAGE", 4096)


def odd_file(folder):
    """Tensors that begin anywhere in blocks of the disk, and end with the file."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"a": (100, 70), "b": (4096,), "c": (333, 21), "d": (1,), "e": (64, 64)}
    made = {name: torch.randn(size, generator=generator).to(torch.bfloat16) for name, size in sizes.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return made


@pytest.mark.parametrize("how", ["from the disk", "from the cache", "refused", "refused in the middle"])
def test_tensors_that_are_read_past_the_page_cache_are_those_of_the_file(tmp_path, small_pages, monkeypatch, how):
    made = odd_file(tmp_path)
    with open(tmp_path / "model.safetensors", "rb") as file:
        os.fsync(file.fileno())
        if how != "from the cache":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    real, reads = os.preadv, []

    def preadv(fd, rooms, start, *flags):
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if is_direct and how.startswith("refused"):
            if how == "refused":
                raise OSError(errno.EINVAL, "Invalid argument")
            if sum(reads[-1:]):
                raise OSError(errno.EINVAL, "Invalid argument")
            rooms = [rooms[0][: files.BLOCK_BYTES]]
        reads.append(is_direct)
        return real(fd, rooms, start, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    content, plain = Content(), Content()
    memory = files.Memory(is_past_cache=True)
    tensors = files.read_tensors(tmp_path)
    found = {name: one for name, one, _ in files.read_ahead(tensors, pin=False, content=content, memory=memory)}
    assert found.keys() == made.keys()
    assert all(torch.equal(found[name], made[name]) for name in made)
    list(files.read_ahead(tensors, pin=False, content=plain))
    assert content.tensors() == plain.tensors()
    if how in ("from the cache", "refused"):
        assert not any(reads)


def test_memory_is_taken_again_when_nobody_has_what_was_in_it(small_pages, monkeypatch):
    memory = files.Memory()
    first = memory.take(10_000)
    part, place = first[4096:8192].view(torch.float32), first.data_ptr()
    del first
    second = memory.take(10_000)
    assert second.data_ptr() != place, "a view of the first is in use"
    part.fill_(1.0)
    del part
    third = memory.take(9_000)
    assert third.data_ptr() == place
    assert third.data_ptr() % 4096 == 0
    del second, third
    kept = sum(len(pages) for pages in memory._free.values())
    monkeypatch.setattr(files, "MOST_KEPT", 20_000)
    large = memory.take(30_000)
    assert (kept, sum(len(pages) for pages in memory._free.values())) == (2, 0)
    del large
    assert not any(memory._free.values()), "what is larger is the system's again"


def test_weights_of_a_model_on_a_cpu_are_read_without_mapping_their_file(tmp_path, small_pages, monkeypatch):
    """A file that is mapped beside the weights that were copied from it would count in the process's peak."""
    tiny_model("llama").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")

    def mapped(*_):
        raise AssertionError("the file was mapped")

    monkeypatch.setattr(files.Tensor, "read", mapped)
    loaded = load_model(Run(model=str(tmp_path), data=["-"]), dtype="fp32", device="cpu").state_dict()
    assert stored.keys() <= loaded.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored), "each has pages of its own"
    assert len({loaded[name].untyped_storage().data_ptr() for name in stored}) == len(stored)


def test_a_body_without_its_head_is_read_tensor_by_tensor_and_written_as_the_whole_model(tmp_path):
    model = tiny_model("llama", tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    held = files_of(model, tmp_path)
    assert held is not None
    name = "model.layers.0.mlp.up_proj.weight"
    assert [entry.name for entry in held[name].entries] == ["layers.0.mlp.up_proj.weight"]
    assert [stored for stored, _ in stored_parts(name, ShardSlice(torch.zeros(1), 0, 1), held)] == [name]
    found = {name: tensor for name, tensor, _ in read_ahead(held, pin=False)}
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in found.items())
