#!/bin/bash
# The first process of one sandbox machine, in its own namespaces. When it ends, the kernel ends all the others.
# Usage: machine.sh HOSTNAME BASE GROUP SHARED_TMP TREE DAEMONS [CGROUP_MOUNT...]
# SHARED_TMP: folders below the host's /tmp that every machine sees, one per line.
set -eu
host=$1 base=$2 group=$3 shared_tmp=$4 tree=$5 daemons=$6
shift 6

# Tell the launcher this process's pid on the host, which /proc shows until it is mounted again. Then wait until the
# launcher has recorded the pid and connected the network. If the launcher dies first, read fails and the machine ends.
read -r pid _ </proc/self/stat
echo "$pid"
read -r _
exec >>"$base/log/$host.log" 2>&1

# This machine's own /tmp. It is built beside the host's /tmp, which stays visible until everything is bound.
mount -t tmpfs -o mode=1777 tmpfs "$base/tmp"
while read -r folder; do
    [[ -z $folder ]] || { mkdir -p "$base$folder" && mount --bind "$folder" "$base$folder"; }
done <<<"$shared_tmp"

# The root directory of another Debian becomes this machine's root. The host's other directories are bound into it.
if [[ -n $tree ]]; then
    mount --bind "$tree" "$tree"
    for place in /* /usr/local /var/tmp; do
        case $place in
            /bin | /boot | /etc | /lib* | /lost+found | /proc | /run | /sbin | /tmp | /usr | /var) ;;
            *) [[ ! -d $place ]] || { mkdir -p "$tree$place" && mount --rbind "$place" "$tree$place"; } ;;
        esac
    done
    mount -t proc proc "$tree/proc"
    cd "$tree"
    pivot_root . mnt
    cd /
    umount --lazy /mnt
fi

hostname "$host"
mount -t proc proc /proc
mount --bind "$base/etc/hosts" /etc/hosts
[[ ! -d /etc/slurm ]] || mount --bind "$base/etc" /etc/slurm
[[ ! -d /dev/shm ]] || mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --move "$base/tmp" /tmp
for hierarchy in "$@"; do
    mount --bind "$hierarchy/$group/$host" "$hierarchy"
done

# In the background: a daemon may wait for another machine, and this script has to watch its launcher meanwhile.
trap 'exit 1' TERM
{ bash -ec "$daemons" </dev/null || kill -TERM $$; } &

# This machine lives as long as its launcher, unless the launcher sends `detach`. Bash reaps orphans meanwhile.
if read -r word && [[ $word == detach ]]; then
    exec </dev/null
    sleep infinity &
    wait $!
fi
