"""gzip by ISA-L and by zlib: each reads the output of the other, and both report damage."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.runtime import file_writing

pytest.importorskip("isal")


def without_isal(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "isal", None)


@pytest.fixture(params=["ISA-L", "zlib"])
def packer(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "zlib":
            without_isal(patch)
        yield request.param


def packed(pieces: list[bytes]) -> bytes:
    packer = file_writing.compressor(zlib_level=4)
    return b"".join([*map(packer.compress, pieces), packer.flush()])


def unpacked(path: Path) -> bytes:
    with file_writing.open_gzip(path) as file:
        return file.read()


def test_isal_is_taken_where_it_is_installed(packer: str) -> None:
    assert isinstance(file_writing.compressor(1), type(zlib.compressobj())) == (packer == "zlib")


PIECES = st.binary(max_size=200) | st.integers(0, 9).map(lambda times: b'{"ph":"X"},' * 10**4 * times)


@given(pieces=st.lists(PIECES, max_size=5))
def test_each_reads_what_the_other_writes(pieces: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("packed") / "a.gz"
    whole = b"".join(pieces)
    for writes_without in (False, True):
        for reads_without in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                if writes_without:
                    without_isal(patch)
                path.write_bytes(packed(pieces))
            with pytest.MonkeyPatch.context() as patch:
                if reads_without:
                    without_isal(patch)
                assert unpacked(path) == whole
    assert gzip.decompress(path.read_bytes()) == whole


WHOLE = gzip.compress(b'[{"ph":"X"}]' * 1000)


@pytest.mark.parametrize(
    "damaged",
    {
        "cut off": WHOLE[:-9],
        "checksum": WHOLE[:-8] + b"12345678",
        "length": WHOLE[:-4] + b"1234",
        "header only": WHOLE[:10],
        "two bytes": WHOLE[:2],
        "noise": b"\x1f\x8b" + bytes(range(256)),
        "noise in the middle": WHOLE[:20] + b"\xff\x00\xff\x00" + WHOLE[24:],
        "noise behind": WHOLE + b"noise",
        "cut off second part": WHOLE + WHOLE[:30],
    }.items(),
    ids=lambda case: case[0],
)
def test_damage_raises_a_listed_gzip_error(packer: str, damaged: tuple[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "damaged.gz"
    path.write_bytes(damaged[1])
    with pytest.raises(file_writing.list_gzip_errors()):
        unpacked(path)


def test_parts_one_behind_the_other_are_read_as_one(packer: str, tmp_path: Path) -> None:
    path = tmp_path / "parts.gz"
    path.write_bytes(packed([b"one "]) + packed([b"two"]))
    assert unpacked(path) == b"one two"
