#!/bin/bash
# Stands in for the commands of a batch queue (qsub, bsub, condor_submit, and those that delete), by whose names it is
# called: what is submitted starts at once, as processes of this machine. $QUEUE is a folder for what it has to know.
name=${0##*/}
case $name in
  qdel | bkill | condor_rm)
    echo "$1" >>"$QUEUE/deleted"
    while read -r group; do kill -TERM -- "-$group" 2>/dev/null; done <"$QUEUE/$1"
    exit 0
    ;;
  bsub) script=$(cat) ;;
  *) script=$(cat "$1") ;;
esac
copies=$(grep -oE '(-t 1-|\[1-|^queue )[0-9]+' <<<"$script" | grep -oE '[0-9]+$')
if [ "$name" = condor_submit ]; then script=$(sed -n 's/^executable *= *//p' <<<"$script"); fi
for _ in $(seq "$copies"); do
  setsid bash -c "$script" </dev/null >/dev/null 2>&1 &
  echo $! >>"$QUEUE/4711"
done
if [ "$name" = condor_submit ]; then echo "2 job(s) submitted to cluster 4711."; else echo "Job <4711> is submitted"; fi
