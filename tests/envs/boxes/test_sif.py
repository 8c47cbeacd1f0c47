"""Images of boxes: which file or folder, where its squashfs begins, and a mount that all share."""

import asyncio
import os
import shutil
import signal
import struct

import pytest
from test_box import SMALL, killed_worker, nothing_is_left, running  # noqa: F401

from envs import services
from envs.boxes import sif
from envs.boxes.box import NEED, Box
from envs.sandbox import sandbox
from envs.services import CheckerError
from settings.environment_services import Services
from support.box_images import make_image, make_sif

mounted = pytest.mark.skipif(
    not (
        shutil.which("squashfuse_ll") and shutil.which("mksquashfs") and os.path.exists("/dev/fuse")
    ),
    reason="needs /dev/fuse, squashfuse and squashfs-tools",
)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A .sif with a repository of one file."""
    if problem := sandbox.problem():
        pytest.skip(f"no sandbox here: {problem}")
    root = make_image(tmp_path_factory.mktemp("box") / "image", {"calc.py": "x = 1\n"})
    return make_sif(root, root.with_suffix(".sif"))


@mounted
async def test_boxes_share_a_mount_and_no_change(image):
    async with Box(image, size=SMALL) as box, Box(image, size=SMALL) as other:
        assert len(sif.Mount.shown) == 1
        ran = await box.run("id -u; echo y >>calc.py; git diff | tail -1; touch /usr/bin/x", 10)
        assert (ran.output, ran.code) == ("0\n+y\n", 0)
        assert (await other.run("cat calc.py; [ -e /usr/bin/x ] || echo none", 10)).output == (
            "x = 1\nnone\n"
        )
        await box.put("/testbed/deep/a", b"1")
        assert await box.get("/testbed/deep/a", 10) == b"1"
    assert not sif.Mount.shown


@mounted
async def test_the_processes_of_root_are_bounded_too(image):
    """Those of a .sif belong to the user nobody, where this user is root."""
    bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: print('refused'); break\n"
    async with Box(image, size=SMALL) as box:
        await box.put("/bomb.py", bomb.encode())
        ran = await box.run("python /bomb.py", 20)
        assert "refused" in ran.output and not ran.ended
        async with running(box) as (task, found):
            (user,) = {os.stat(f"/proc/{pid}").st_uid for pid in found}
            assert user == (65534 if sif.is_root() else os.getuid())
            task.cancel()


@pytest.mark.slow
@mounted
async def test_a_mount_that_is_killed_is_an_error(image):
    """What the commands of its boxes said is no verdict; the next box has a new mount."""
    async with Box(image, size=SMALL) as box:
        (mount,) = sif.Mount.shown.values()
        async with running(box, "sleep 1; cat calc.py") as (task, _):
            os.kill(mount.process.pid, signal.SIGKILL)
        with pytest.raises(CheckerError, match="is not mounted: code -9"):
            task.result()
        async with Box(image, size=SMALL) as other:
            assert (await other.run("cat calc.py", 10)).output == "x = 1\n"


@pytest.mark.slow
@mounted
def test_a_worker_that_is_killed_leaves_no_mount(image):
    killed_worker(image)


@pytest.mark.slow
@mounted
async def test_a_mount_outlives_a_cancelled_start(image):
    for seconds in (0.0, 0.01, 0.02, 0.04, 0.06):
        first, second = (asyncio.create_task(Box(image, size=SMALL).__aenter__()) for _ in range(2))
        await asyncio.sleep(seconds)
        first.cancel()
        await asyncio.wait({first})
        box = await second
        assert (await box.run("cat calc.py", 10)).output == "x = 1\n"
        await box.__aexit__()
        if not first.cancelled():
            await first.result().__aexit__()
        assert not sif.Mount.shown


def test_a_folder_needs_another_user_than_root(tmp_path, monkeypatch):
    monkeypatch.delenv(sif.AS_ROOT)
    monkeypatch.setattr(sif, "is_root", lambda: True)
    with pytest.raises(CheckerError, match="is a folder, and this user is root: .*BOXES_AS_ROOT=1"):
        asyncio.run(Box(tmp_path).__aenter__())


def test_what_is_missing_is_named_at_the_start(tmp_path, monkeypatch):
    assert "services.images = '', expected a folder of images" in NEED.problem()
    services.configure(Services(images=str(tmp_path)))
    assert not NEED.problem()
    monkeypatch.delenv(sif.AS_ROOT)
    assert ("GRPO_BOXES_AS_ROOT=1" in NEED.problem()) == sif.is_root()
    (tmp_path / "a.sif").touch()
    with monkeypatch.context() as changed:
        changed.setattr(shutil, "which", {"bwrap": "/usr/bin/bwrap"}.get)
        assert "squashfuse_ll is not on the path: apt install" in NEED.problem()
    monkeypatch.setattr(shutil, "which", str)
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert not NEED.problem()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "/dev/fuse, through which a .sif is mounted" in NEED.problem()


def test_an_image_is_a_folder_or_a_file(tmp_path):
    services.configure(Services(images=str(tmp_path)))
    with pytest.raises(CheckerError, match=r"a/b:c is missing: expected \S+/a_b_c.sif, or a fold"):
        sif.find("a/b:c")
    (tmp_path / "a_b_c.sif").touch()
    assert sif.find("a/b:c") == sif.find("/elsewhere/a_b_c.sif") == tmp_path / "a_b_c.sif"
    (tmp_path / "a_b_c").mkdir()
    assert sif.find("a/b:c") == tmp_path / "a_b_c"


def header(total: int, at: int = 4096, magic: bytes = b"SIF_MAGIC") -> bytes:
    start = struct.pack("<32s10s22s8q", b"#!/", magic, b"", 0, 0, 0, total, at, 0, 0, 0)
    return start.ljust(4096, b"\0")


PART = struct.pack("<i?IIIqqq4q128sii", 0x4004, True, 1, 0, 0, 8192, 9, 9, *[0] * 4, b"", 1, 2)


@pytest.mark.parametrize(("content", "message"), [
    (b"", "unpack requires a buffer of 128"),
    (b"\x7fELF" + bytes(200), "magic b'"),
    (header(1, magic=b"SIF_OTHER"), "magic b'SIF_OTHER"),
    (header(0), "none of its 0 parts is a squashfs"),
    (header(1), "unpack requires a buffer of 585"),
    (header(-1, at=-1), "Invalid argument|negative"),
    ((header(1) + PART).ljust(8192, b"\0") + b"LUKS", "none of its 1 parts is a squashfs"),
    ((header(1) + PART[:4] + b"\0" + PART[5:]).ljust(8192, b"\0") + b"hsqs", "none of its 1 par"),
])  # fmt: skip
def test_what_is_no_sif_is_an_error(tmp_path, content, message):
    (tmp_path / "a.sif").write_bytes(content)
    with pytest.raises(
        CheckerError, match=f"a.sif is not a .sif that can be mounted: .*({message})"
    ):
        sif.squashfs_at(tmp_path / "a.sif")


def test_where_the_squashfs_begins(tmp_path):
    file = tmp_path / "a.sif"
    file.write_bytes((header(1) + PART).ljust(8192, b"\0") + b"hsqs")
    assert sif.squashfs_at(file) == 8192
    file.write_bytes(b"hsqs".ljust(200, b"\0"))
    assert sif.squashfs_at(file) == 0


@mounted
async def test_a_damaged_squashfs_is_an_error(tmp_path):
    file = tmp_path / "a.sif"
    file.write_bytes((header(1) + PART).ljust(8192, b"\0") + b"hsqs" + bytes(5000))
    with pytest.raises(CheckerError, match="a.sif is not mounted: code [1-9]"):
        async with Box(file, size=SMALL):
            pass
    assert not sif.Mount.shown
