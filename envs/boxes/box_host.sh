# The first process of each command in a box (envs/boxes/box.py): when it ends, all other processes
# that the command started end as well. It uses only bash builtins, because the policy may have
# removed or replaced everything else. No process in the box can kill or stop it.
# Arguments: the maximum number of processes, the working folder, then a command and its arguments.
ulimit -u "$1"
# Variables that the Dockerfile set with ENV, if the image was converted from a Docker image.
environment=/.singularity.d/env/10-docker2singularity.sh
[ ! -r "$environment" ] || . "$environment"
cd -- "$2" || exit
"${@:3}"
exit
