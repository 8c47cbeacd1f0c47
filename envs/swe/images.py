"""Runs scripts in repository images, which are folders below services.images.

This is not an environment itself: envs/swe/swe_patch.py uses it.
"""

from envs.boxes.image_names import folder_of
from envs.sandbox import sandbox
from envs.services import CheckerError

SIZES = {"memory": 16 << 30, "file_size": 4 << 30, "output": 16 << 20, "disk": 4 << 30}
KILLED = (-9, -15, 137, 143)  # exit codes of a run that a signal from outside may have ended
LIMITS = sandbox.Limits(seconds=900, processes=1000, open_files=4096, **SIZES)
READY = "the image is set up\n"
SETUP = """
work=$PWD
export PIP_NO_INDEX=1
code=0
bash setup.sh >setup.log 2>&1 || code=$?
# 126, 127: its last command, git, could not be run
if [ $code = 126 ] || [ $code = 127 ] ||
    grep -qE '^error: patch|No space left on device' setup.log; then
    tail -n 20 setup.log
    exit
fi
cd /testbed || exit
"""
# Arguments: the edited files, which exist in the image already.
EVALUATE = f"""{SETUP}
for path; do [ -f "$path" ] || {{ echo "no file $path"; exit; }}; done
cp -r "$work/edited/." . && echo '{READY.strip()}' && bash "$work/test.sh" 2>&1
"""
REPRODUCE = f"""{SETUP}
git apply --check "$work/there.patch" || exit
[ ! -s "$work/gold.patch" ] || git apply "$work/gold.patch" || exit
conda=/opt/miniconda3/bin/activate
[ ! -f $conda ] || {{ source $conda; conda activate testbed; }}
python -c '' >/dev/null 2>&1 || {{ echo "no python"; exit; }}
cp "$work/reproduce_bug.py" . && rm -r "$work"/* && echo '{READY.strip()}' || exit
exec python reproduce_bug.py >/dev/null 2>&1
"""


async def run_in_image(
    image: str, script: str, files: dict[str, str], args: list[str]
) -> sandbox.Ran:
    """Runs a bash script on the files; `stdout` is the output after READY.

    The script prints READY before any part of an answer runs. Raises CheckerError if it does not,
    or if the image is missing. A run ended by a signal is repeated once, because another process
    may have sent the signal. A signal in the second run counts as the answer's own.
    """
    folder = folder_of(image)
    if not folder.is_dir():
        raise CheckerError(
            f"the image {image} is missing: expected a folder {folder}: "
            "bash launch/images.sh ROWS FOLDER fetches the images that a file of rows names"
        )
    files = files | {"judge.sh": script}
    for _ in range(2):
        ran = await sandbox.run(
            ["bash", "judge.sh", *args], files=files, root=str(folder), limits=LIMITS
        )
        if ran.code not in KILLED:
            break
    before, ready, log = ran.stdout.partition(READY)
    if not ready:
        why = " ".join(f"{ran.ended} {before} {ran.stderr}".split())[-500:]
        raise CheckerError(f"the image {image} cannot be set up, code {ran.code}: {why}")
    return ran._replace(stdout=log)
