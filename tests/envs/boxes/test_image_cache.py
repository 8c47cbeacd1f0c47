"""Copies of images on a node: whose digest is right, for how long, for which processes."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from test_box import SMALL, nothing_is_left  # noqa: F401

from envs import services
from envs.boxes import image_cache, sif
from envs.boxes.box import Box
from envs.boxes.image_cache import near
from envs.sandbox import sandbox
from envs.services import CheckerError
from envs.swe import swe
from launch import tiny_image
from settings.environment_services import Services
from support.box_images import make_image, make_sif
from support.program import ROOT
from support.repairs import calling
from support.scripts import Script

MIB = 1 << 20
mounted = pytest.mark.skipif(
    bool(sandbox.problem())
    or not (shutil.which("squashfuse_ll") and shutil.which("mksquashfs"))
    or not os.path.exists("/dev/fuse"),
    reason="needs bubblewrap, /dev/fuse, squashfuse and squashfs-tools",
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder of copies of 2.5 MiB at most."""
    monkeypatch.setenv(image_cache.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setenv(image_cache.MOST, str(2.5 / 1024))
    monkeypatch.setattr(image_cache, "_noted", [])
    return tmp_path / "cache"


def write(folder: Path, name: str, size: int = MIB, digest: bool = True) -> Path:
    """A file of a folder that is shared, of bytes of its own, and its digest."""
    image = folder / f"{name}.sif"
    image.write_bytes((name.encode() * (size // len(name) + 1))[:size])
    if digest:
        found = hashlib.sha256(image.read_bytes()).hexdigest()
        image.with_name(f"{image.name}.sha256").write_text(f"{found}  {image.name}\n")
    return image


def copies(cache: Path) -> list[str]:
    """The names in a cache, without their digests."""
    return sorted(path.name.rpartition("-")[0] for path in cache.glob("*.sif"))


async def test_without_a_folder_an_image_is_read_where_it_lies(tmp_path):
    image = write(tmp_path, "a")
    async with near(image) as file:
        assert file == image


@pytest.mark.parametrize("digest", [True, False])
async def test_a_copy_is_made_once_and_is_that_of_the_image(tmp_path, cache, digest):
    image = write(tmp_path, "a", digest=digest)
    async with near(image) as file:
        assert file.parent == cache and file.read_bytes() == image.read_bytes()
        made = file.stat().st_ino
    async with near(image) as first, near(image) as second:
        assert first == second and first.stat().st_ino == made
    image.write_bytes(b"another")
    write(tmp_path, "a", 2 * MIB - 1, digest)
    async with near(image) as file:
        assert file.read_bytes() == image.read_bytes()
    assert {path.suffix for path in cache.iterdir()} <= {".sif", ""}


async def test_what_was_not_used_for_longest_goes_and_nothing_in_use(tmp_path, cache, caplog):
    a, b, c = (write(tmp_path, name) for name in "abc")
    for image in (a, b, a):
        async with near(image):
            await asyncio.sleep(0.02)
    async with near(c):
        assert copies(cache) == ["a", "c"]
        async with near(a) as kept, near(b) as there:
            assert there == b and kept.parent == cache, "two of two are in use"
            async with near(write(tmp_path, "d", 1)) as small:
                assert small.parent == cache and copies(cache) == ["a", "c", "d"]
    assert caplog.text.count("images are read in place") == 1
    assert "2 of 2 MiB are in use, so 1 MiB more do not fit" in caplog.text
    async with near(b) as file:
        assert file.read_bytes() == b.read_bytes()


async def test_an_image_that_differs_from_its_digest_is_an_error(tmp_path, cache):
    image = write(tmp_path, "a")
    with open(image, "r+b") as file:
        file.write(b"damaged")
    with pytest.raises(CheckerError, match=r"a\.sif differs from its \.sha256: VERIFY=true bash"):
        async with near(image):
            pass
    assert not copies(cache) and not list(cache.glob("*.partial"))


async def test_what_another_process_has_left_half_written_is_written_anew(tmp_path, cache):
    image = write(tmp_path, "a")
    async with near(image) as file:
        whole = file
    whole.rename(whole.with_suffix(".partial"))
    whole.with_suffix(".partial").write_bytes(b"half")
    async with near(image) as file:
        assert file == whole and file.read_bytes() == image.read_bytes()
    assert not list(cache.glob("*.partial"))


async def test_half_written_copies_that_are_wanted_no_more_make_room(tmp_path, cache):
    cache.mkdir()
    (cache / "gone-0.partial").write_bytes(bytes(2 * MIB))
    async with near(write(tmp_path, "a")) as file:
        assert file.parent == cache and not (cache / "gone-0.partial").exists()


async def test_a_wait_for_another_process_ends(tmp_path, cache, monkeypatch):
    """Then the image is read where it lies."""
    monkeypatch.setattr(image_cache, "COPY", 0.5)
    image = write(tmp_path, "a")
    async with near(image) as file:
        partial = file.with_suffix(".partial")
        file.unlink()
    partial.touch()
    writes = image_cache._opened(partial, image_cache.fcntl.LOCK_EX)
    with writes:
        began = time.monotonic()
        async with near(image) as file:
            assert file == image and time.monotonic() - began < 30
    async with near(image) as file:
        assert file.parent == cache


@pytest.mark.parametrize("again", [False, True])
def test_a_file_that_goes_as_it_is_locked_is_none(tmp_path, monkeypatch, again):
    """Such as one that was removed to make room, or got its name, since it was opened."""
    path = tmp_path / "a"
    path.touch()
    flock = image_cache.fcntl.flock

    def late(*given):
        path.unlink()
        if again:
            path.touch()
        flock(*given)

    monkeypatch.setattr(image_cache.fcntl, "flock", late)
    assert image_cache._opened(path, image_cache.fcntl.LOCK_SH) is None


async def test_a_start_that_is_given_up_leaves_no_open_file(tmp_path, cache):
    image = write(tmp_path, "a")
    for seconds in (0, 0.001, 0.003, 0.01):
        task = asyncio.create_task(near(image).__aenter__())
        await asyncio.sleep(seconds)
        if not task.cancel():  # it was there already
            continue
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.3)
        opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
        assert not [path for path in opened if path.startswith(str(cache))]


USES = """
import asyncio, hashlib, random, sys
from pathlib import Path
from envs.boxes.image_cache import near
rng = random.Random(int(sys.argv[1]))
images = [Path(word) for word in sys.argv[2:]]
async def use(image):
    async with near(image) as file:
        kept = file.parent != image.parent
        await asyncio.sleep(rng.random() / 50)
        assert file.read_bytes() == image.read_bytes(), file
        return kept
async def main():
    kept = 0
    for _ in range(15):
        kept += sum(await asyncio.gather(*(use(rng.choice(images)) for _ in range(2))))
    print(kept)
asyncio.run(main())
"""


@pytest.mark.slow
def test_many_processes_at_once_see_whole_images_within_the_limit(tmp_path, cache):
    """Six of them take five images through a folder that holds two; two are killed meanwhile."""
    images = [str(write(tmp_path, name, MIB + i)) for i, name in enumerate("abcde")]
    command = [sys.executable, "-c", USES]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([*command, str(i), *images], **options) for i in range(8)]
    largest = 0
    for process in running[:2]:
        time.sleep(0.7)
        process.kill()
    while any(process.poll() is None for process in running):
        with contextlib.suppress(FileNotFoundError), image_cache._sole(cache):
            largest = max(largest, sum(path.stat().st_size for path in cache.iterdir()))
        time.sleep(0.01)
    ended = [process.communicate() for process in running]
    assert all(process.returncode == 0 for process in running[2:]), ended
    assert sum(int(said) for said, _ in ended[2:]) > 20, "some were copies"
    assert largest <= 2.5 * MIB
    taken = [image_cache._opened(path, image_cache.fcntl.LOCK_EX) for path in cache.glob("*.sif")]
    assert all(taken), "none is in use"
    for file in taken:
        file.close()


@pytest.mark.parametrize(("folder", "most", "message"), [
    ("relative", "1", "GRPO_IMAGE_CACHE = 'relative': expected the absolute path"),
    ("/proc/none", "1", "GRPO_IMAGE_CACHE = '/proc/none': expected a folder on this node's disk"),
    (None, "many", "GRPO_IMAGE_CACHE_GIB = 'many': expected how many GiB"),
    (None, "1", "GRPO_IMAGE_CACHE_GIB = '1' without GRPO_IMAGE_CACHE"),
])  # fmt: skip
def test_a_cache_that_cannot_be_is_named(tmp_path, monkeypatch, folder, most, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(image_cache.MOST, most)
    if folder:
        monkeypatch.setenv(image_cache.FOLDER, folder)
    assert message in image_cache.problem()


# --- boxes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A .sif with a repository of one file, and its digest."""
    root = make_image(tmp_path_factory.mktemp("box") / "image", {"calc.py": "x = 1\n"})
    file = make_sif(root, root.with_suffix(".sif"))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.with_name(f"{file.name}.sha256").write_text(f"{digest}  {file.name}\n")
    return file


@contextlib.contextmanager
def small_disk(folder: Path, size: str):
    """A folder that is a disk of this size, where this user may mount one."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs a user that may mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@mounted
async def test_a_box_reads_the_copy_which_stays_while_it_is_open(image, cache, monkeypatch):
    monkeypatch.setenv(image_cache.MOST, str(1.5 * image.stat().st_size / 2**30))
    async with Box(image, size=SMALL) as box:
        (shown,) = sif.Mount.shown
        assert shown.parent == cache
        async with near(write(image.parent, "other", image.stat().st_size)) as file:
            assert file.parent == image.parent and shown.exists()
        assert (await box.run("cat calc.py", 10)).output == "x = 1\n"
    async with near(image.with_name("other.sif")) as file:
        assert file.parent == cache and not shown.exists()


@pytest.mark.slow
@mounted
async def test_a_full_disk_costs_a_box_its_copy_alone(image, cache, monkeypatch, caplog):
    """Of the copies, and of temporary files: it opens, and says once where its image is read."""
    monkeypatch.delenv(image_cache.MOST)
    with small_disk(cache, "1m") as disk:
        (disk / "full").write_bytes(bytes(MIB - 8192))
        monkeypatch.setenv("TMPDIR", str(disk))
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        with contextlib.suppress(OSError), open(disk / "rest", "wb") as file:
            file.write(bytes(MIB))
        for _ in range(2):
            async with Box(image, size=SMALL) as box:
                assert list(sif.Mount.shown) == [image]
                assert (await box.run("echo y >y; cat calc.py y", 10)).output == "x = 1\ny\n"
    assert caplog.text.count("images are read in place") == 1


@pytest.mark.slow
@mounted
async def test_a_full_disk_or_a_damaged_image_is_never_an_episode_that_earned_0(
    tmp_path, cache, monkeypatch
):
    """With the first an episode is as ever; the second is an error, and so another try."""
    monkeypatch.delenv(image_cache.MOST)
    row = tiny_image.make_bugs(tmp_path / "images")["add"] | {"harness": "bash"}
    folder = tmp_path / "images" / tiny_image.FOLDER
    file = make_sif(folder, folder.with_name(f"{folder.name}.sif"))
    shutil.rmtree(folder)
    services.configure(Services(images=str(tmp_path / "images")), services.Limits(600.0))
    answers = [calling("bash", command="sed -i s/minus/plus/ add.py"), "Done."]
    with small_disk(cache, "1m"):
        assert (await swe.rollout(row, Script(answers))).reward.value == 1
    file.with_name(f"{file.name}.sha256").write_text("0" * 64)
    with pytest.raises(CheckerError, match="differs from its .sha256"):
        await swe.rollout(row, Script(answers))


@pytest.mark.slow
@mounted
def test_a_worker_that_is_killed_gives_its_image_back(image, cache, monkeypatch):
    monkeypatch.setenv(image_cache.MOST, str(1.5 * image.stat().st_size / 2**30))
    holds = f"""
import asyncio
from envs.boxes.box import Box
async def main():
    async with Box({str(image)!r}):
        print("open", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    command = [sys.executable, "-c", holds]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout.readline() == "open\n"
        (copy,) = cache.glob("*.sif")
        assert not image_cache._removed(copy)
        worker.send_signal(signal.SIGKILL)
    end = time.monotonic() + 5
    while not image_cache._removed(copy):
        assert time.monotonic() < end
        time.sleep(0.05)
