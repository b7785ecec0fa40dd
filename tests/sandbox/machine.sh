#!/bin/bash
# The first process of one sandbox machine, inside namespaces of its own: when it ends, the kernel ends all the others.
# Usage: machine.sh HOSTNAME BASE GROUP OWN_TMP(yes|no) TREE DAEMONS [CGROUP_MOUNT...]
set -eu
host=$1 base=$2 group=$3 own_tmp=$4 tree=$5 daemons=$6
shift 6

# Tell the launcher this process's pid outside, which /proc shows until it is mounted anew, then wait until it has
# noted the pid and plugged in the network. If the launcher dies meanwhile, read fails and so does this machine.
read -r pid _ </proc/self/stat
echo "$pid"
read -r _
exec >>"$base/log/$host.log" 2>&1

# Another Debian's tree becomes this machine's root, beside all directories of the host that are not the system's own.
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
[[ $own_tmp != yes ]] || mount -t tmpfs -o mode=1777 tmpfs /tmp
for hierarchy in "$@"; do
    mount --bind "$hierarchy/$group/$host" "$hierarchy"
done

# In the background, since a daemon may wait for another machine while this one has to watch its launcher.
trap 'exit 1' TERM
{ bash -ec "$daemons" </dev/null || kill -TERM $$; } &

# Until the launcher says otherwise, this machine lives as long as the launcher does. Bash reaps orphans meanwhile.
if read -r word && [[ $word == detach ]]; then
    exec </dev/null
    sleep infinity &
    wait $!
fi
