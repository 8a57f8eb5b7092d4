#!/usr/bin/env bash
# Installs those of the named Debian packages that are missing, where the user may; otherwise names them and stops.
set -euo pipefail

present() {
  case $1 in
    g++) command -v g++ ;;
    python3-venv) "${PYTHON:-python3}" -c 'import ensurepip, venv' ;;
    libgtest-dev) g++ -E -x c++ - <<< '#include <gtest/gtest.h>' ;;
  esac &> /dev/null
}

missing=()
for package; do
  present "$package" || missing+=("$package")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

as_root=()
if [[ $(id -u) -ne 0 ]]; then as_root=(sudo -n); fi
if ! command -v apt-get > /dev/null || ! "${as_root[@]}" true 2> /dev/null; then
  echo "octavo: please install the system packages that are missing: ${missing[*]}" >&2
  exit 1
fi
"${as_root[@]}" apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}"
