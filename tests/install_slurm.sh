#!/usr/bin/env bash
# Installs the Slurm that the tests start for themselves (tests/slurm_cluster.py): Debian packages, and for sacct a database
# server without its service (tests/slurm_accounting.py); no daemon left running. Does nothing where they are present. Where
# it cannot (no apt, not root), it says why and the tests of a live Slurm are skipped, which pytest's summary repeats; `make test
# CI=1` counts each of them as a failure.
set -euo pipefail

PATH="$PATH:/usr/sbin:/sbin"
packages=(slurmctld slurmd slurm-client munge slurmdbd mariadb-server-core mariadb-client-core)
look() {
    missing=()
    for program in munged slurmctld slurmd scontrol slurmdbd mariadbd mariadb-install-db my_print_defaults; do
        command -v "$program" > /dev/null || missing+=("$program")
    done
    (( ${#missing[@]} ))
}
look || exit 0

cannot() { echo "tests of a live Slurm will be skipped: ${missing[*]} not installed, and $1" >&2; exit 0; }

for conf in /etc/slurm/slurm.conf /etc/slurm-llnl/slurm.conf "${SLURM_CONF:-}"; do
    [[ -s $conf ]] && cannot "this machine has a Slurm already ($conf), which is left as it is"
done
command -v apt-get > /dev/null || cannot "this is no Debian or Ubuntu (install Slurm, munge and mariadb yourself)"
as_root=()
if (( EUID )); then
    sudo -n true 2> /dev/null || cannot "this user may not install packages: sudo apt-get install ${packages[*]}"
    as_root=(sudo -n)
fi

echo "installing ${packages[*]}, for the tests of a live Slurm" >&2
# The packages start system services, now and at boot, unless told not to; the tests run daemons of their own.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" > /dev/null || cannot "$policy cannot be written"
    "${as_root[@]}" chmod 755 "$policy" || cannot "$policy cannot be made executable"
    trap '"${as_root[@]}" rm -f "$policy"' EXIT
fi
"${as_root[@]}" apt-get -qq update || cannot "the package index cannot be fetched"
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends \
    "${packages[@]}" > /dev/null || cannot "apt-get install failed (see above)"
if command -v systemctl > /dev/null; then
    "${as_root[@]}" systemctl --quiet disable slurmctld slurmd slurmdbd munge 2> /dev/null || true
fi
hash -r
if look; then cannot "the packages ${packages[*]} do not bring it here"; fi
