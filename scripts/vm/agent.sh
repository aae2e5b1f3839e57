#!/bin/sh
# The first process of a guest: gets drivers, devices and network ready, and then carries out jobs. A job N is the file
# /jobs/N.job, which the host makes by renaming; its output goes to N.out, and its exit code to N.rc when it has ended.
# Jobs run side by side, each in a session of its own.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
exec >/dev/console 2>&1
mkdir -p /dev/shm /dev/pts /jobs
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
for driver in $(cat /etc/maru-drivers); do
  modprobe "$driver"
done
mount -t 9p -o trans=virtio,version=9p2000.L,cache=none,msize=131072 jobs /jobs

. /jobs/settings
hostname "$NAME"
echo "$MACHINE" >/etc/machine-id
ip link set lo up
if [ -n "$ADDRESS" ]; then
  ip addr add "$ADDRESS" dev eth0
  ip link set eth0 up
fi
export PYTHONDONTWRITEBYTECODE=1

cd /opt/maru || exit 1
: >/jobs/up
while :; do
  for job in /jobs/*.job; do
    [ -e "$job" ] || continue
    stem=${job%.job}
    mv "$job" "$stem.sh"
    (
      setsid bash "$stem.sh" >"$stem.out" 2>&1 </dev/null
      echo $? >"$stem.part"
      mv "$stem.part" "$stem.rc"
    ) &
  done
  sleep 0.2
done
