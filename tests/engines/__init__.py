"""Engines for the tests of launchers: a private Slurm (``slurm.sh``), private SSH hosts (``ssh.sh``), stand-ins for the
commands of other queues (``queue.sh``), and an engine of another package (:mod:`.processes`) that starts agents as
processes of this machine."""
