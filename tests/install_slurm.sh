#!/usr/bin/env bash
# Installs the Slurm that the tests start for themselves (tests/slurm_cluster.py): four Debian packages, no daemon left
# running. Does nothing where they are present. Where it cannot (no apt, not root), it says so and the tests of a live
# Slurm are skipped, which pytest's summary repeats.
set -euo pipefail

PATH="$PATH:/usr/sbin:/sbin"
missing=()
for program in munged slurmctld slurmd scontrol; do
    command -v "$program" > /dev/null || missing+=("$program")
done
(( ${#missing[@]} )) || exit 0

cannot() { echo "tests of a live Slurm will be skipped: ${missing[*]} not installed, and $1" >&2; exit 0; }

command -v scontrol > /dev/null && cannot "this machine has a Slurm already, which is left as it is"
command -v apt-get > /dev/null || cannot "this is no Debian or Ubuntu (install Slurm and munge yourself)"
as_root=()
if (( EUID )); then
    sudo -n true 2> /dev/null || cannot "this user may not install packages: sudo apt-get install slurmctld slurmd slurm-client munge"
    as_root=(sudo -n)
fi

echo "installing slurmctld slurmd slurm-client munge, for the tests of a live Slurm" >&2
# The packages start system services, now and at boot, unless told not to; the tests run daemons of their own.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" > /dev/null
    "${as_root[@]}" chmod 755 "$policy"
    trap '"${as_root[@]}" rm -f "$policy"' EXIT
fi
"${as_root[@]}" apt-get -qq update || cannot "the package index cannot be fetched"
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends \
    slurmctld slurmd slurm-client munge > /dev/null || cannot "apt-get install failed (see above)"
if command -v systemctl > /dev/null; then
    "${as_root[@]}" systemctl --quiet disable slurmctld slurmd munge 2> /dev/null || true
fi
