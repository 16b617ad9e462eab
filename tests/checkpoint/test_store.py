import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunesmith.checkpoint import codec
from tunesmith.checkpoint import store as module
from tunesmith.checkpoint.lock import RunLock
from tunesmith.checkpoint.store import CheckpointStore
from tunesmith.errors import UserError

from . import writer

FILES = ["tensors.safetensors", "state.json", "manifest.json"]


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def store(tmp_path, warnings):
    return CheckpointStore(tmp_path / "checkpoints", "lineage", keep=3, warn=warnings.append)


def save(store, step, metric=None):
    return store.save(step, {"weight": torch.full((4, 3), step + 0.5)}, {"step": step}, metric=metric)


def reopen(store, warnings, keep=3):
    return CheckpointStore(store.folder, store.lineage, keep=keep, warn=warnings.append)


def steps(store):
    return [checkpoint.step for checkpoint in store.all()]


def names(store):
    return sorted(path.name for path in store.folder.iterdir())


def assert_same(found: torch.Tensor, expected: torch.Tensor):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.device.type == "cpu"
    as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found, expected)]
    assert torch.equal(*as_bytes)


# What is saved comes back.


def test_every_kind_of_tensor_comes_back_bit_for_bit(store):
    base = torch.randn(6, 8)
    tensors = {
        "fp32": base,
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.randn(1, 5).expand(7, 5),
        "shared": base,
        "shared view": base[2:4],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "scalar": torch.tensor(1.25),
        "scalar bf16": torch.tensor(-0.0, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "empty too": torch.empty(3, 0, 2, dtype=torch.int8),
        "denormal": torch.tensor([5e-324, -0.0, 1.7e308], dtype=torch.float64),
        "bf16": torch.randn(9).bfloat16(),
        "fp16": torch.tensor([65504.0, 6e-8], dtype=torch.float16),
        "fp8": torch.randn(7).to(torch.float8_e4m3fn),
        "fp8 wide": torch.randn(3, 3).to(torch.float8_e5m2),
        "bool": torch.tensor([True, False, True]),
        "rng": torch.get_rng_state(),
        'näme with ünicode / and "quotes"': torch.ones(1),
    }
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32):
        tensors[str(dtype)] = torch.tensor([0, 1, torch.iinfo(dtype).max], dtype=dtype)
    saved = store.save(7, tensors, {})
    loaded, _ = store.load(store.latest())
    assert store.latest() == saved
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert_same(loaded[name], tensor)
    assert set(safetensors.torch.load_file(saved.path / "tensors.safetensors")) == set(tensors)


@settings(max_examples=20, deadline=None)
@given(
    st.dictionaries(
        st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=10,
        ),
    )
)
def test_state_is_read_back_exactly(state):
    found = json.loads(codec.encode_state(state))
    assert repr(found) == repr(state)  # repr tells 1 from 1.0 and 0.0 from -0.0


def test_no_tensors_and_no_state_are_a_checkpoint_too(store):
    store.save(0, {}, {})
    assert store.load(store.latest()) == ({}, {})


def test_large_checkpoints_are_split_into_several_files(store, monkeypatch):
    monkeypatch.setattr(codec, "SHARD_BYTES", 1000)
    monkeypatch.setattr(codec, "CHUNK_BYTES", 64)
    tensors = {f"t{i}": torch.randn(n) for i, n in enumerate([100, 100, 100, 999, 1, 0, 250])}
    saved = store.save(1, tensors, {"a": 1})
    shards = sorted(path.name for path in saved.path.glob("*.safetensors"))
    assert len(shards) == 5
    assert shards[0] == "tensors-00001-of-00005.safetensors"
    loaded, state = store.load(saved)
    assert state == {"a": 1}
    for name, tensor in tensors.items():
        assert_same(loaded[name], tensor)
    (saved.path / shards[1]).unlink()
    assert store.latest() is None


def test_files_are_written_several_at_a_time_and_a_failure_of_one_leaves_nothing_behind(store, warnings, monkeypatch):
    monkeypatch.setattr(codec, "SHARD_BYTES", 1000)
    tensors = {f"t{i}": torch.randn(250) for i in range(9)}
    saved = store.save(1, tensors, {})
    assert len(list(saved.path.glob("*.safetensors"))) == 9
    for name, tensor in store.load(saved)[0].items():
        assert_same(tensor, tensors[name])
    real = codec.write_new

    def full(path, chunks):
        if "00005-of" in path.name:
            failing(errno.ENOSPC)()
        return real(path, chunks)

    monkeypatch.setattr(codec, "write_new", full)
    assert store.save(2, tensors, {}) is None
    assert "No space left" in warnings[0]
    assert names(store) == ["step-00000001"]


def test_tensors_begin_at_blocks_of_the_file_where_they_can(store):
    tensors = {
        "count": torch.tensor(3),
        "a": torch.randn(4096),
        "b": torch.randn(64, 64).bfloat16(),
        "c": torch.ones(3),
    }
    saved = store.save(1, {name: module.copy_to_host(tensor) for name, tensor in tensors.items()}, {})
    data = (saved.path / "tensors.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert all((8 + size + header[name]["data_offsets"][0]) % 4096 == 0 for name in "ab")
    for name, tensor in store.load(saved)[0].items():
        assert_same(tensor, tensors[name])


def test_a_checkpoint_of_the_first_format_is_read(store):
    saved = save(store, 3, metric=0.5)
    manifest = json.loads((saved.path / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["format"] = 1
    for name in manifest["files"]:
        content = (saved.path / name).read_bytes()
        manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (saved.path / "manifest.json").write_bytes(codec.encode_manifest(manifest))
    assert reopen(store, []).latest() == saved
    assert store.load(saved)[1] == {"step": 3}
    (saved.path / "state.json").write_text("{}")
    assert reopen(store, []).latest() is None


def test_the_same_content_gives_the_same_bytes(tmp_path):
    paths = [save(CheckpointStore(tmp_path / name, "x"), 1, 0.5).path for name in "ab"]
    for name in FILES:
        assert (paths[0] / name).read_bytes() == (paths[1] / name).read_bytes()


# What must not be saved is not.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_never_saved(store, dtype, bad):
    save(store, 1)
    weight = torch.zeros(5, 5)
    weight[3, 2] = bad
    with pytest.raises(UserError, match=r"layer.weight holds NaN or infinite.* step 2"):
        store.save(2, {"fine": torch.ones(3), "layer.weight": weight.to(dtype)}, {})
    assert names(store) == ["step-00000001"]


def test_nan_in_fp8_without_infinity_is_found(store):
    with pytest.raises(UserError, match="weight"):
        store.save(2, {"weight": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)}, {})


def test_large_but_finite_values_are_saved(store):
    assert store.save(1, {"weight": torch.full((1000,), 3e38)}, {})


def test_nan_in_state_or_metric_is_refused_and_named(store):
    with pytest.raises(UserError, match=r"state\.schedule\[1\]\.rate is nan"):
        store.save(1, {}, {"schedule": [1, {"rate": float("nan")}]})
    with pytest.raises(UserError, match="metric is inf"):
        store.save(1, {}, {}, metric=float("inf"))
    assert store.latest() is None


def test_state_that_json_would_change_is_refused(store):
    with pytest.raises(TypeError, match="key 3"):
        store.save(1, {}, {"by step": {3: 4}})
    with pytest.raises(TypeError):
        store.save(1, {}, {"tensor": torch.ones(1)})


# Damage is found, named, and stepped over.


def damages():
    for name in FILES:
        yield pytest.param(lambda path, name=name: (path / name).unlink(), "is missing", id=f"{name} missing")
        yield pytest.param(lambda path, name=name: (path / name).write_bytes(b""), name, id=f"{name} emptied")
        yield pytest.param(
            lambda path, name=name: (path / name).write_bytes((path / name).read_bytes() + b"\n"),
            name,
            id=f"{name} extended",
        )
        yield pytest.param(
            lambda path, name=name: (path / name).write_bytes(bytes((path / name).stat().st_size)),
            "checksum|garbled",
            id=f"{name} zeroed",
        )
    yield pytest.param(lambda path: (shutil.rmtree(path), path.mkdir()), "manifest.json is missing", id="emptied")
    yield pytest.param(lambda path: (shutil.rmtree(path), path.touch()), "manifest.json is missing", id="a file")
    yield pytest.param(lambda path: (path / "manifest.json").write_text("[" * 100000), "garbled", id="nested garbage")


@pytest.mark.parametrize(("damage", "said"), damages())
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(store, warnings, damage, said):
    before, newest = save(store, 1), save(store, 2)
    damage(newest.path)
    assert store.latest() == before
    assert len(warnings) == 1
    assert str(newest.path) in warnings[0]
    assert re.search(said, warnings[0])
    assert store.load(before)[1] == {"step": 1}
    with pytest.raises(UserError, match="step-00000002"):
        store.load(newest)


@pytest.mark.parametrize("name", FILES)
def test_truncation_at_any_length_is_found(store, name):
    before, newest = save(store, 1), save(store, 2)
    whole = (newest.path / name).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little") if name.endswith("safetensors") else 8
    for length in {0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1}:
        (newest.path / name).write_bytes(whole[:length])
        assert store.latest() == before
        with pytest.raises(UserError):
            store.load(newest)
    (newest.path / name).write_bytes(whole)
    assert store.latest() == newest


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found(store, name):
    before, newest = save(store, 1), save(store, 2)
    file = newest.path / name
    whole = file.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        file.write_bytes(flipped)
        assert store.latest() == before, position
        with pytest.raises(UserError):
            store.load(newest)


def test_damage_after_latest_is_found_by_load(store):
    saved = save(store, 1)
    assert store.latest() == saved
    data = bytearray((saved.path / "tensors.safetensors").read_bytes())
    data[-1] ^= 1
    (saved.path / "tensors.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="checksum"):
        store.load(saved)


def test_tensors_are_read_into_the_room_that_is_given(store):
    tensors = {"a": torch.arange(12.0).view(4, 3), "b": torch.tensor(7), "c": torch.arange(5).bfloat16()}
    saved = store.save(1, tensors, {})
    rooms = {}

    def room(name, shape, dtype):
        rooms[name] = torch.zeros(shape, dtype=dtype)
        return rooms[name]

    found, _ = store.load_rows(saved, lambda name: (1, 3) if name == "a" else None, room)
    assert rooms.keys() == tensors.keys()
    assert all(found[name].tensor is rooms[name] for name in tensors)
    assert_same(rooms["a"], tensors["a"][1:3])
    assert_same(rooms["b"], tensors["b"])
    assert_same(rooms["c"], tensors["c"])


def test_extra_files_are_neither_loaded_nor_an_error(store, warnings):
    saved = save(store, 1)
    (saved.path / "notes.txt").write_text("the good one")
    (saved.path / "tensors-00002.safetensors").write_bytes(b"garbage")
    assert store.latest() == saved
    assert set(store.load(saved)[0]) == {"weight"}
    assert not warnings


def test_when_all_are_damaged_there_is_none(store, warnings):
    for step in (1, 2):
        (save(store, step).path / "state.json").unlink()
    assert store.latest() is None
    assert store.best() is None
    assert store.all() == []
    assert len(warnings) == 2  # each named once


def test_saving_over_a_damaged_checkpoint_replaces_it(store, warnings):
    save(store, 1)
    damaged = save(store, 2)
    (damaged.path / "state.json").write_text("{}")
    assert store.latest().step == 1
    assert save(store, 2) == store.latest()
    assert names(store) == ["step-00000001", "step-00000002"]


def test_saving_a_step_again_replaces_it(store):
    save(store, 1)
    save(store, 2, metric=3.0)
    again = store.save(2, {"other": torch.ones(2)}, {"again": True}, metric=1.0)
    assert store.latest() == again
    assert store.load(again)[1] == {"again": True}
    assert names(store) == ["step-00000001", "step-00000002"]


def test_a_checkpoint_set_aside_when_the_process_died_is_still_found(store):
    save(store, 1)
    saved = save(store, 2)
    aside = saved.path.rename(store.folder / "step-00000002.aside-0123abcd")
    assert store.latest().path == aside
    assert steps(store) == [1, 2]
    save(store, 2)
    assert names(store) == ["step-00000001", "step-00000002"]


# What else lies in the folder.


def test_a_missing_folder_holds_no_checkpoints(store):
    assert store.latest() is None
    assert store.best() is None
    assert store.all() == []
    assert not store.folder.exists()


def test_folders_that_only_look_newer_are_not_used(store, warnings):
    saved = save(store, 5)
    (store.folder / "step-00000100").mkdir()
    shutil.copytree(saved.path, store.folder / "step-00000200")
    for garbage in ("step-", "step-12", "step-0000000x", "step-00000009 (copy)", "step-00000300.bak", "latest"):
        shutil.copytree(saved.path, store.folder / garbage)
    (store.folder / "step-00000400").symlink_to(store.folder / "nowhere")
    before = names(store)
    assert store.latest() == saved
    assert steps(store) == [5]
    named = re.findall(r"/(step-[^/]*) is damaged", "\n".join(warnings))
    assert sorted(named) == ["step-00000100", "step-00000200", "step-00000400"]
    assert any("copy of step 5" in w for w in warnings)
    for step in range(6, 12):
        save(store, step)
    assert set(before) - set(names(store)) == {"step-00000005"}


def test_another_lineage_is_not_loaded_not_counted_not_deleted_and_named_once(store, warnings):
    other = CheckpointStore(store.folder, "other", keep=9)
    for step in (1, 3, 50, 60):
        save(other, step, metric=0.1)
    for step in range(1, 8):
        save(store, step, metric=1.0)
    assert store.latest().step == 7
    assert steps(store) == [1, 5, 6, 7]
    assert store.best().step == 1
    store.latest()
    assert "step-00000050" in warnings[0]
    assert len([w for w in warnings if "step-00000050, step-00000060" in w]) <= 2  # again once one is set aside
    assert steps(other) == [1, 3, 50, 60]
    assert other.load(other.all()[0])[1] == {"step": 1}
    with pytest.raises(UserError, match="other settings"):
        store.load(other.latest())


def test_leftovers_of_dead_processes_are_removed_and_those_of_live_ones_kept(store):
    saved = save(store, 1)
    dead = subprocess.Popen(["true"])
    dead.wait()
    alive = subprocess.Popen(["sleep", "60"])
    try:
        leftovers = {
            f"step-00000002.partial-{dead.pid}-00000000": False,
            f".trash-{dead.pid}-00000000": False,
            f"step-00000002.partial-{os.getpid()}-00000000": False,  # our pid, but no one writes it
            f"step-00000002.partial-{alive.pid}-00000000": True,
            "step-00000002.partial-mine": True,
            ".trash-of-mine": True,
        }
        for name in leftovers:
            shutil.copytree(saved.path, store.folder / name)
        assert store.latest() == saved
        assert set(names(store)) == {"step-00000001", *(name for name, stays in leftovers.items() if stays)}
    finally:
        alive.kill()
        alive.wait()


def test_a_checkpoint_being_written_is_left_alone_by_a_reader(store, monkeypatch):
    save(store, 1)
    real = module.verify

    def look_meanwhile(path, step, **known):
        if "partial" in path.name:
            assert CheckpointStore(store.folder, "lineage").latest().step == 1
            assert path.exists()
        real(path, step, **known)

    monkeypatch.setattr(module, "verify", look_meanwhile)
    assert save(store, 2) == store.latest()


# The file system refuses.


def failing(number):
    def fail(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("where", ["mkdir", "fsync", "rename", "write"])
def test_a_refused_write_costs_a_warning_and_nothing_else(store, warnings, monkeypatch, where, number):
    before = save(store, 1)
    with monkeypatch.context() as patch:
        if where == "write":
            patch.setattr(codec, "encode_tensors", failing(number))
        else:
            patch.setattr(os, where, failing(number))
        assert save(store, 2) is None
    assert len(warnings) == 1
    assert "step 2" in warnings[0]
    assert os.strerror(number) in warnings[0]
    assert names(store) == ["step-00000001"]
    assert store.latest() == before
    assert save(store, 2) == store.latest()


def test_free_space_is_looked_at_before_writing(store, warnings, monkeypatch):
    save(store, 1)
    usage = shutil.disk_usage(store.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(codec, "write_new", failing(errno.EIO))
    assert save(store, 2) is None
    assert "it needs 1.0 MiB, and 1000 bytes are free; the one of step 1 is kept." in warnings[0]


def test_what_is_left_for_the_result_is_not_taken_by_a_checkpoint(store, warnings, monkeypatch):
    usage = shutil.disk_usage(store.folder.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3 * 2**20))
    assert save(store, 1) is not None
    store._leave = 2 * 2**20
    assert save(store, 2) is None
    assert "it needs 1.0 MiB, the result 2.0 MiB, and 3.0 MiB are free; the one of step 1 is kept." in warnings[0]


def test_a_disk_that_does_not_say_what_is_free_is_written_to(store, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", failing(errno.EIO))
    assert save(store, 1) is not None


def test_a_first_checkpoint_that_cannot_be_written_is_not_said_to_have_one_before_it(store, warnings, monkeypatch):
    monkeypatch.setattr(codec, "encode_tensors", failing(errno.ENOSPC))
    assert save(store, 1) is None
    assert "there is none before it" in warnings[0]


def test_bytes_that_are_not_on_the_disk_are_not_acknowledged(store, warnings, monkeypatch):
    save(store, 1)
    real = codec.write_new

    def lossy(path, chunks):
        result = real(path, chunks)
        if path.name == "tensors.safetensors":
            data = bytearray(path.read_bytes())
            data[-3] ^= 4
            path.write_bytes(data)
        return result

    monkeypatch.setattr(codec, "write_new", lossy)
    for step in range(2, 9):
        assert save(store, step) is None
    assert "checksum" in warnings[0]
    assert names(store) == ["step-00000001"]


def test_an_interrupt_while_saving_leaves_nothing_behind(store, monkeypatch):
    save(store, 1)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "verify", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(store, 2)
    assert names(store) == ["step-00000001"]


def test_a_failed_tidy_up_does_not_lose_the_save(store, warnings, monkeypatch):
    for step in (1, 2, 3):
        save(store, step)
    real = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(
            Path,
            "rename",
            lambda path, to: failing(errno.EACCES)() if ".trash" in to.name else real(path, to),
        )
        assert save(store, 4).step == 4
    assert "tidied" in warnings[0]
    assert steps(store) == [1, 2, 3, 4]
    save(store, 5)
    assert steps(store) == [3, 4, 5]


def test_a_checkpoint_that_cannot_be_read_now_is_not_deleted(store, monkeypatch):
    for step in (1, 2, 3):
        save(store, step, metric=float(step))
    fresh = reopen(store, [])
    real = codec.digest_file
    with monkeypatch.context() as patch:
        patch.setattr(
            codec,
            "digest_file",
            lambda path, *how, **ways: (
                failing(errno.EIO)() if path.parent.name == "step-00000001" else real(path, *how, **ways)
            ),
        )
        assert save(fresh, 4).step == 4
    assert steps(store) == [1, 2, 3, 4]


@contextmanager
def mounted(folder: Path, options: str):
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_costs_a_warning_and_room_made_later_is_used(tmp_path, warnings, monkeypatch):
    with mounted(tmp_path / "small", "size=4m"):
        store = CheckpointStore(tmp_path / "small" / "checkpoints", "x", warn=warnings.append)
        first = save(store, 1)
        filler = tmp_path / "small" / "filler"
        filler.write_bytes(bytes(3 * 2**20 + 2**19))
        assert save(store, 2) is None
        assert "are free" in warnings[0]
        # A disk that fills up while the files are written, after the look at the free space:
        usage = shutil.disk_usage(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: usage)
            assert store.save(2, {"big": torch.zeros(2**20)}, {}) is None
        assert "No space left on device" in warnings[1]
        assert names(store) == ["step-00000001"]
        assert store.latest() == first
        filler.unlink()
        assert save(store, 2) == store.latest()


def test_a_read_only_folder_costs_a_warning_and_is_still_read(tmp_path, warnings):
    folder = tmp_path / "run"
    with mounted(folder, "size=4m"):
        store = CheckpointStore(folder / "checkpoints", "x", warn=warnings.append)
        first = save(store, 1)
        shutil.copytree(first.path, store.folder / ".trash-99-00000000")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        assert save(store, 2) is None
        assert "Read-only file system" in warnings[-1]
        assert store.latest() == first
        assert store.load(first)[1] == {"step": 1}
        with pytest.raises(UserError, match="read-only"), RunLock(folder):
            pass
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        assert save(store, 2) == store.latest()


def test_a_folder_without_write_permission_costs_a_warning(store, warnings):
    first = save(store, 1)
    store.folder.chmod(0o555)
    try:
        if os.access(store.folder, os.W_OK):
            pytest.skip("root may write anywhere")
        assert save(store, 2) is None
        assert "Permission denied" in warnings[0]
        assert store.latest() == first
    finally:
        store.folder.chmod(0o755)


def test_a_file_in_place_of_the_folder_is_a_clear_error_when_resuming(store, warnings):
    store.folder.write_text("")
    with pytest.raises(UserError, match="cannot be listed"):
        store.latest()
    assert save(store, 1) is None
    assert len(warnings) == 1


# Which are kept.


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    keep=st.integers(1, 3),
    events=st.lists(
        st.tuples(
            st.integers(1, 3),  # steps since the last save
            st.none() | st.integers(0, 4),  # metric
            st.sampled_from(["", "", "", "damage", "reopen", "fail"]),
        ),
        max_size=12,
    ),
)
def test_the_newest_whole_ones_and_the_best_are_kept_and_nothing_else(tmp_path_factory, keep, events):
    """Held against a model of the folder: step -> (metric, whole)."""
    folder = tmp_path_factory.mktemp("retention")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        store = CheckpointStore(folder, "x", keep=keep, warn=lambda text: None)
        model: dict[int, tuple[int | None, bool]] = {}
        step = 0
        for advance, metric, event in events:
            step += advance
            if event == "fail":
                with pytest.MonkeyPatch.context() as broken:
                    broken.setattr(codec, "encode_tensors", failing(errno.ENOSPC))
                    assert save(store, step, metric) is None
            else:
                assert save(store, step, metric) is not None
                model[step] = (metric, True)
                whole = sorted((s for s in model if model[s][1]), reverse=True)
                measured = [(model[s][0], s) for s in whole if model[s][0] is not None]
                kept = {*whole[:keep], *([min(measured)[1]] if measured else [])}
                if len(whole) >= keep:
                    model = {s: v for s, v in model.items() if s in kept or s >= whole[keep - 1]}
            if event == "damage" and model:
                newest = max(model)
                (folder / f"step-{newest:08d}" / "tensors.safetensors").write_bytes(b"")
                model[newest] = (model[newest][0], False)
            if event == "reopen":
                store = CheckpointStore(folder, "x", keep=keep, warn=lambda text: None)
            whole = sorted(s for s in model if model[s][1])
            measured = [(model[s][0], s) for s in whole if model[s][0] is not None]
            assert names(store) == [f"step-{s:08d}" for s in sorted(model)]
            assert steps(store) == whole
            assert getattr(store.latest(), "step", None) == (whole[-1] if whole else None)
            assert getattr(store.best(), "step", None) == (min(measured)[1] if measured else None)


def test_damage_never_costs_the_last_good_one(tmp_path):
    store = CheckpointStore(tmp_path, "x", keep=1, warn=lambda text: None)
    save(store, 1)
    for step in range(2, 6):
        saved = save(store, step)
        assert steps(store) == [step]
        (saved.path / "state.json").write_bytes(b"")
        assert steps(store) == []
    assert save(store, 9).step == 9
    assert names(store) == ["step-00000009"]


def test_a_step_saved_after_going_back_is_not_deleted_at_once(store):
    for step in (10, 20, 30):
        save(store, step)
    assert save(store, 5).path.exists()
    assert steps(store) == [5, 10, 20, 30]


def test_at_least_one_is_kept(tmp_path):
    with pytest.raises(ValueError, match="keep"):
        CheckpointStore(tmp_path, "x", keep=0)


# Kills.


class Writers:
    """The forking process of writer.py, and what its writers have acknowledged."""

    def __init__(self, folder: Path, *options: str):
        command = [sys.executable, writer.__file__, str(folder), *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.acknowledged = -1

    def run(self, step: int, *, dies_at: int = 0, kill_after: float = 0.0) -> None:
        self.process.stdin.write(f"{step} {dies_at}\n")
        for line in self.process.stdout:
            word, *number = line.split()
            if word == "dead":
                return
            if word == "saved":
                self.acknowledged = max(self.acknowledged, int(number[0]))
            elif not dies_at:
                time.sleep(kill_after)
                os.kill(int(number[0]), signal.SIGKILL)
        raise AssertionError("the writers' parent has died")


@pytest.fixture
def writers(tmp_path, request):
    writers = Writers(tmp_path / "checkpoints", *getattr(request, "param", ()))
    yield writers
    writers.process.stdin.close()
    writers.process.wait(10)
    writers.process.stdout.close()


def check_after_kill(folder: Path, acknowledged: int, had_best: tuple | None) -> tuple[int, tuple | None]:
    """Newest step and best (metric, step) after a kill, with everything that must hold checked."""
    warnings = []
    store = CheckpointStore(folder, writer.LINEAGE, keep=writer.KEEP, warn=warnings.append)
    latest = store.latest()
    assert not warnings
    assert (latest.step if latest else -1) >= acknowledged
    for checkpoint in store.all():
        tensors, state = store.load(checkpoint)
        expected = writer.tensors(checkpoint.step)
        assert set(tensors) == set(expected)
        for name, tensor in expected.items():
            assert_same(tensors[name], tensor)
        assert state == writer.state(checkpoint.step)
        assert checkpoint.metric == writer.metric(checkpoint.step)
    best = store.best()
    best = (best.metric, best.step) if best else None
    assert had_best is None or best <= had_best
    leftovers = set(names(store)) - {c.path.name for c in store.all()} if latest else set()
    assert all(re.fullmatch(r"step-\d+\.aside-\w+", name) for name in leftovers), leftovers
    return (latest.step if latest else -1), best


@pytest.mark.parametrize(("writers", "longest"), [((), 0.06), (("9000",), 0.4)], indirect=["writers"])
def test_killed_at_random_moments_nothing_acknowledged_is_lost(tmp_path, writers, longest):
    """With all tensors in one file, and in three that are written at the same time."""
    chance = random.Random(0)
    newest, best = -1, None
    for _ in range(25):
        writers.run(newest + 1, kill_after=chance.uniform(0, longest))
        newest, best = check_after_kill(tmp_path / "checkpoints", writers.acknowledged, best)
    assert newest > 0, "the writers made no progress at all, so nothing was tried"


@pytest.mark.parametrize("again", [False, True])
def test_killed_at_every_file_operation_nothing_acknowledged_is_lost(tmp_path, writers, again):
    """Dying at the 1st, 2nd, 3rd... operation of resuming, saving and tidying up.

    With `again`, the first step is one that is already there: at every instant one of the two is found.
    """
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder, writer.LINEAGE, keep=writer.KEEP)
    newest, best, furthest, dies_at = -1, None, 0, 0
    while furthest < 2 - again:  # until every operation of at least one save and its tidying up was struck
        dies_at += 1
        newest += 1
        saved = store.save(newest, writer.tensors(newest), writer.state(newest), metric=writer.metric(newest))
        assert len(names(store)) <= writer.KEEP + 1
        best = min(best or (saved.metric, newest), (saved.metric, newest))
        started = newest
        writers.run(newest + (not again), dies_at=dies_at)
        newest, best = check_after_kill(folder, max(newest, writers.acknowledged), best)
        furthest = max(furthest, newest - started)
    assert 30 < dies_at < 80


def test_the_best_is_one_of_those_that_were_measured_on_the_newest_data(tmp_path):
    store = CheckpointStore(tmp_path, "l", keep=1)
    for step, (metric, data) in enumerate([(1.0, "a"), (5.0, "b"), (4.0, "b"), (6.0, "b")], start=1):
        store.save(step, {"weight": torch.ones(2)}, {}, metric=metric, measured_on=data)
    assert store.best().metric == 4.0
    assert [found.step for found in store.all()] == [3, 4]
    store.save(5, {"weight": torch.ones(2)}, {})  # not measured
    assert store.best().metric == 4.0


def test_the_best_of_an_older_version_which_does_not_say_its_data_stays(tmp_path):
    store = CheckpointStore(tmp_path, "l", keep=1)
    store.save(1, {"weight": torch.ones(2)}, {}, metric=1.0)
    for step, metric in ((2, 5.0), (3, 4.0)):
        store.save(step, {"weight": torch.ones(2)}, {}, metric=metric, measured_on="b")
    assert store.best().metric == 1.0
