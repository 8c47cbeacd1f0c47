# The first process of each command in a box (envs/boxes/box.py): all others there end with it.
# It uses builtins of bash alone, as the policy may have removed or replaced all else. No process
# in the box can kill or stop it.
# Arguments: the most processes, the working folder, then a command and its arguments.
ulimit -u "$1"
# What the Dockerfile set with ENV, where an image was converted from one of Docker.
environment=/.singularity.d/env/10-docker2singularity.sh
[ ! -r "$environment" ] || . "$environment"
cd -- "$2" || exit
"${@:3}"
exit
