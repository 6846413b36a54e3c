#!/usr/bin/env bash
# Private sshd "hosts" on one machine.   ssh.sh start [DIR] [N] | stop DIR
# MODE=ports (default; any user): N sshd on 127.0.0.1 with a port each.
# MODE=netns (root): host h1..hN, each own net+uts+mount+pid namespace, hostname and address; port 22.
# start prints SSH_CONFIG=...: use  ssh -F $SSH_CONFIG h1 cmd
set -eu
PATH=$PATH:/usr/sbin:/sbin; MODE=${MODE:-ports}
alive() { case $(cut -d' ' -f3 "/proc/$1/stat" 2>/dev/null) in ''|Z) return 1 ;; esac; }
stop() {
  D=$1; local p f
  for f in "$D"/cm-*; do [ -S "$f" ] && ssh -F "$D/config" -o ControlPath="$f" -O exit x 2>/dev/null || true; done
  for f in "$D"/pid/ns*; do [ -s "$f" ] && kill -KILL "$(cat "$f")" 2>/dev/null || true; done   # ends the whole pid namespace
  for f in "$D"/pid/*; do [ -s "$f" ] && kill -TERM "$(cat "$f")" 2>/dev/null || true; done
  for f in "$D"/pid/*; do p=$(cat "$f"); for _ in $(seq 20); do alive "$p" || break; sleep 0.1; done; kill -KILL "$p" 2>/dev/null || true; done
  for f in $(grep -lszFx "FIXTURE_OF=$D" /proc/[0-9]*/environ 2>/dev/null); do f=${f#/proc/}; kill -KILL "${f%/environ}" 2>/dev/null || true; done
  [ -s "$D/bridge" ] && ip link del "$(cat "$D/bridge")" 2>/dev/null || true
  rm -rf "$D"; }
start() {
  D=${1:-$(mktemp -d /tmp/sshfx.XXXXXX)}; N=${2:-2}; mkdir -p "$D/pid" "$D/home"; chmod 700 "$D"; D=$(cd "$D" && pwd -P)
  trap 'stop "$D" >&2 || true' ERR
  ssh-keygen -q -t ed25519 -N '' -f "$D/id" -C fixture; ssh-keygen -q -t ed25519 -N '' -f "$D/hostkey" -C host
  cp "$D/id.pub" "$D/authorized_keys"; chmod 600 "$D/authorized_keys"
  [ "$(id -u)" = 0 ] && mkdir -p -m 755 /run/sshd
  I=$(( $$ % 200 + 20 )); NETP=10.78.$I
  if [ "$MODE" = netns ]; then
    BR=hfx$I; ip link add "$BR" type bridge; echo "$BR" >"$D/bridge"; ip addr add "$NETP.1/24" dev "$BR"; ip link set "$BR" up
    { echo "127.0.0.1 localhost"; for i in $(seq "$N"); do echo "$NETP.$((10 + i)) h$i"; done; } >"$D/hosts"
  else
    read -r -a P <<<"$(python3 -c "
import socket
s=[socket.socket() for _ in range($N)]
[x.bind(('127.0.0.1',0)) for x in s]; print(*[x.getsockname()[1] for x in s])")"
  fi
  # A home of their own: what the user's start-up files run (pyenv's lock, for one) must not be ended in its middle.
  : >"$D/config"; : >"$D/known_hosts"
  for i in $(seq "$N"); do
    PRE=(); A=127.0.0.1; PORT=${P[$((i - 1))]:-22}
    [ "$MODE" = netns ] && { A=$NETP.$((10 + i)); PORT=22; }
    cat >"$D/sshd$i.conf" <<C
ListenAddress $A:$PORT
HostKey $D/hostkey
PidFile none
AuthorizedKeysFile none
AuthorizedKeysCommand /bin/cat $D/authorized_keys
AuthorizedKeysCommandUser $(id -un)
StrictModes ${STRICT:-yes}
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
ClientAliveInterval 5
ClientAliveCountMax 2
X11Forwarding no
PrintMotd no
AcceptEnv none
SetEnv FIXTURE_HOST=h$i FIXTURE_OF=$D HOME=$D/home
C
    if [ "$MODE" = netns ]; then   # pid namespace: killing its init ends every process of that "host"
      setsid unshare --net --uts --mount --propagation private --pid --fork --kill-child --mount-proc \
        sh -c 'trap "exit 0" TERM; while :; do sleep 1000 & wait $!; done' >/dev/null 2>&1 </dev/null &
      echo $! >"$D/pid/ns$i"; H=
      for _ in $(seq 60); do H=$(cat "/proc/$!/task/$!/children" 2>/dev/null | tr -d ' '); [ -n "$H" ] && [ "$(readlink /proc/$H/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break; sleep 0.05; done
      ip link add "h$I-$i" type veth peer name eth0 netns "$H"; ip link set "h$I-$i" master "$BR" up
      PRE=(nsenter -t "$H" -n -u -m -p)
      "${PRE[@]}" sh -c "hostname h$i; mount --bind $D/hosts /etc/hosts; ip link set lo up; ip addr add $A/24 dev eth0; ip link set eth0 up; ip route add default via $NETP.1"
    fi
    setsid ${PRE[@]+"${PRE[@]}"} /usr/sbin/sshd -D -e -f "$D/sshd$i.conf" >"$D/sshd$i.log" 2>&1 </dev/null &
    echo $! >"$D/pid/sshd$i"
    printf 'Host h%s\n  HostName %s\n  Port %s\n' "$i" "$A" "$PORT" >>"$D/config"
    printf '[%s]:%s %s\n%s %s\n' "$A" "$PORT" "$(cut -d' ' -f1,2 "$D/hostkey.pub")" "$A" "$(cut -d' ' -f1,2 "$D/hostkey.pub")" >>"$D/known_hosts"
  done
  cat >>"$D/config" <<C
Host *
  User $(id -un)
  IdentityFile $D/id
  IdentitiesOnly yes
  UserKnownHostsFile $D/known_hosts
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 5
  ServerAliveInterval 5
  ServerAliveCountMax 2
  ControlPath $D/cm-%C
C
  for i in $(seq "$N"); do for k in $(seq 50); do ssh -F "$D/config" "h$i" true 2>"$D/err" && break; sleep 0.1; [ "$k" = 50 ] && { cat "$D/err" "$D/sshd$i.log" >&2; false; }; done; done
  echo "export SSH_CONFIG=$D/config SSH_FIXTURE_DIR=$D"; }
case ${1:-} in start) shift; start "$@" ;; stop) stop "${2:?DIR}" ;; *) sed -n 2,5p "$0"; exit 2 ;; esac
