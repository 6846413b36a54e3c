#!/usr/bin/env bash
# Private Slurm "cluster" on one machine: munged + slurmctld + N slurmd, no systemd, no cgroups.
#   slurm.sh start [DIR] [N]   prints "export SLURM_CONF=... " lines on stdout (eval them)
#   slurm.sh stop DIR          ends every process it started (by pid file), removes DIR
# MODE=ports (default): N slurmd on 127.0.0.1 with one port each (any user; all nodes share hostname+address)
# MODE=netns (root):    each slurmd in its own net+uts+mount namespace: own hostname n1.., own address
set -eu
cmd=${1:-}; PATH=$PATH:/usr/sbin:/sbin
MODE=${MODE:-ports}

wait_for() { # wait_for SECONDS WHAT CMD...
  local end=$((SECONDS + $1)) what=$2; shift 2
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || { echo "timeout: $what" >&2; tail -n 8 "$D"/log/*.log >&2; return 1; }
    sleep 0.1
  done; }
free_ports() { python3 - "$1" <<'P'
import socket,sys
s=[socket.socket() for _ in range(int(sys.argv[1]))]
[x.bind(("127.0.0.1",0)) for x in s]; print(*[x.getsockname()[1] for x in s])
P
}
daemon() { # daemon NAME [prefix...] -- argv   (foreground daemon, own session, pid recorded)
  local name=$1; shift
  setsid "$@" >>"$D/log/$name.log" 2>&1 </dev/null &
  echo $! >"$D/pid/$name"; }

alive() { case $(cut -d' ' -f3 "/proc/$1/stat" 2>/dev/null) in ''|Z) return 1 ;; esac; }
end_all() { # TERM to all the named daemons at once, KILL what is left after 3 s
  local n p ps=
  for n in "$@"; do [ -s "$D/pid/$n" ] && p=$(cat "$D/pid/$n") && kill -TERM "$p" 2>/dev/null && ps="$ps $p"; done
  for _ in $(seq 30); do for p in $ps; do alive "$p" && { sleep 0.1; continue 2; }; done; return 0; done
  for p in $ps; do kill -KILL "$p" 2>/dev/null || true; done; }

stop() {
  D=$1; [ -d "$D/pid" ] || { echo "no fixture in $D" >&2; return 1; }
  export SLURM_CONF=$D/slurm.conf
  timeout 5 scancel --full --signal=KILL --state=RUNNING 2>/dev/null || true
  timeout 5 scancel --state=PENDING 2>/dev/null || true
  # job processes are children of slurmstepd, not of slurmd: wait until they are gone
  for _ in $(seq 30); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.1; done
  end_all $(ls "$D/pid" | grep '^slurmd') slurmctld; end_all munged $(ls "$D/pid" | grep '^ns')
  # what a dead slurmctld could not cancel: step daemons and job processes carry our SLURM_CONF
  local e p
  for e in $(grep -lszFx "SLURM_CONF=$D/slurm.conf" /proc/[0-9]*/environ 2>/dev/null); do
    p=${e#/proc/}; p=${p%/environ}
    if [ "$(cat "/proc/$p/comm" 2>/dev/null)" = slurmstepd ] || grep -qsz '^SLURM_JOB_ID=' "$e"; then kill -KILL "$p" 2>/dev/null || true; fi
  done
  [ -s "$D/bridge" ] && { for i in $(ip -o link show master "$(cat "$D/bridge")" | sed 's/^[0-9]*: \([^@:]*\).*/\1/'); do ip link del "$i" 2>/dev/null || true; done
      ip link del "$(cat "$D/bridge")" 2>/dev/null || true; }
  rm -rf "$D"; }

start() {
  D=${1:-$(mktemp -d /tmp/slurmfx.XXXXXX)}; N=${2:-3}
  mkdir -p "$D"/{pid,log,ctl,jobs}; chmod 755 "$D"; D=$(cd "$D" && pwd -P); ME=$(id -un)
  trap 'stop "$D" >&2 || true' ERR
  mkdir -m 755 "$D/munge"; ( umask 077; head -c 128 /dev/urandom >"$D/munge/key" )
  daemon munged munged -F --key-file="$D/munge/key" --socket="$D/munge/s" --pid-file="$D/munge/pid" \
      --log-file="$D/log/munged.log" --seed-file="$D/munge/seed" --num-threads=2 --force
  read -r -a P <<<"$(free_ports $((N + 1)))"
  CTLADDR=127.0.0.1; CTLHOST=localhost
  if [ "$MODE" = netns ]; then
    I=$(( $$ % 200 + 20 )); NETP=10.77.$I; CTLADDR=$NETP.1; CTLHOST=$(hostname -s); BR=sfx$I
    ip link add "$BR" type bridge; echo "$BR" >"$D/bridge"
    ip addr add "$CTLADDR/24" dev "$BR"; ip link set "$BR" up
    { echo "127.0.0.1 localhost"; echo "$CTLADDR $CTLHOST ctl"
      for i in $(seq "$N"); do echo "$NETP.$((10 + i)) n$i"; done; } >"$D/hosts"
  fi
  { cat <<C
ClusterName=fx$$
SlurmctldHost=$CTLHOST($CTLADDR)
SlurmctldPort=${P[0]}
SlurmUser=$ME
SlurmdUser=$ME
AuthType=auth/munge
AuthInfo=socket=$D/munge/s
CredType=cred/munge
StateSaveLocation=$D/ctl
SlurmdSpoolDir=$D/spool-%n
SlurmctldPidFile=$D/ctl/slurmctld.pid
SlurmdPidFile=$D/ctl/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0
ReturnToService=1
SlurmdParameters=config_overrides
SlurmdTimeout=${SLURMD_TIMEOUT:-30}
SlurmctldTimeout=30
InactiveLimit=0
EnforcePartLimits=ALL
KillWait=3
MinJobAge=300
CompleteWait=0
Waittime=0
PropagateResourceLimits=NONE
C
    for i in $(seq "$N"); do
      if [ "$MODE" = netns ]; then
        echo "NodeName=n$i NodeHostname=n$i NodeAddr=$NETP.$((10 + i)) Port=${P[$i]} CPUs=2 State=UNKNOWN"
      else
        echo "NodeName=n$i NodeHostname=localhost NodeAddr=127.0.0.1 Port=${P[$i]} CPUs=2 State=UNKNOWN"
      fi
    done
    echo "PartitionName=test Nodes=n[1-$N] Default=YES MaxTime=00:30:00 DefaultTime=00:05:00 State=UP OverTimeLimit=0"
  } >"$D/slurm.conf"
  export SLURM_CONF=$D/slurm.conf
  wait_for 5 "munged socket" test -S "$D/munge/s"
  daemon slurmctld slurmctld -D -f "$D/slurm.conf"
  for i in $(seq "$N"); do
    mkdir -p "$D/spool-n$i"; PRE=()
    if [ "$MODE" = netns ]; then
      daemon "ns-n$i" unshare --net --uts --mount --propagation private sleep infinity
      H=$(cat "$D/pid/ns-n$i")
      wait_for 3 "namespace" test "$(readlink /proc/self/ns/net)" != x
      until [ "$(readlink /proc/$H/ns/net)" != "$(readlink /proc/self/ns/net)" ] \
         && [ "$(readlink /proc/$H/ns/mnt)" != "$(readlink /proc/self/ns/mnt)" ]; do sleep 0.05; done
      ip link add "v$I-$i" type veth peer name eth0 netns "$H"; ip link set "v$I-$i" master "$BR" up
      PRE=(nsenter -t "$H" -n -u -m)
      "${PRE[@]}" sh -c "hostname n$i; mount --bind $D/hosts /etc/hosts; ip link set lo up
          ip addr add $NETP.$((10 + i))/24 dev eth0; ip link set eth0 up; ip route add default via $CTLADDR"
    fi
    daemon "slurmd-n$i" ${PRE[@]+"${PRE[@]}"} slurmd -D -N "n$i" -f "$D/slurm.conf"
  done
  wait_for 10 "slurmctld" scontrol ping
  wait_for 15 "nodes idle" sh -c "[ \"\$(sinfo -h -N -t idle -o %N | wc -l)\" = $N ]"
  echo "export SLURM_CONF=$D/slurm.conf SLURM_FIXTURE_DIR=$D"; }

case $cmd in
  start) shift; start "$@" ;;
  stop) stop "${2:?DIR}" ;;
  *) sed -n 2,7p "$0"; exit 2 ;;
esac
