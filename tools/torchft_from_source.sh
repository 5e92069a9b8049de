#!/usr/bin/env bash
# Builds a wheel of torchft where there is none (aarch64) and no registry of crates: its Rust dependencies are taken from
# Debian's packages of them. Once: some twenty minutes on two cores, 1 GB. Needs Debian, root, cargo and protoc.
#
#     tools/torchft_from_source.sh build/torchft-env/bin/python build/torchft-wheels        # for that Python; the folder of the wheel
#
# Debian's crates are a little older than those that torchft asks for. What differs is four calls, changed below: its
# Python files and its protocol stay as they are.
set -euo pipefail

python=$(realpath -s "$1")
wheels=$(realpath -m "$2")
work="$wheels/source"
version=0.2.0
suite=trixie
crates="anyhow askama atty axum chrono fern gethostname log prost prost-types pyo3 rand stderrlog structopt tokio tonic tonic-build"

echo "there is no wheel of torchft for this machine: it is built, once, in some twenty minutes"
mkdir -p "$work"/{apt/lists,apt/cache/archives/partial,apt/etc,crates,stub,source}
command -v protoc > /dev/null || apt-get install -y protobuf-compiler

# 1. torchft's source. pip asks its build system for metadata; a stub answers, so that no crate is needed yet.
cat > "$work/stub/maturin.py" << 'STUB'
import os
def prepare_metadata_for_build_wheel(folder, config=None):
    name = "torchft-0.2.0.dist-info"
    os.makedirs(os.path.join(folder, name))
    open(os.path.join(folder, name, "METADATA"), "w").write("Metadata-Version: 2.1\nName: torchft\nVersion: 0.2.0\n")
    return name
STUB
PYTHONPATH="$work/stub" "$python" -m pip download -q --no-deps --no-binary=torchft --no-build-isolation -d "$work" "torchft==$version"
tar xzf "$work/torchft-$version.tar.gz" -C "$work/source" --strip 1

# 2. Debian's crates, and those they need, from another suite than the machine's own: nothing of it is installed.
awk -v RS= -v suite="$suite" 'NR==1 { sub(/Suites:[^\n]*/, "Suites: " suite); print }' /etc/apt/sources.list.d/debian.sources > "$work/apt/etc/crates.sources"
touch "$work/apt/status"
cat > "$work/apt/apt.conf" << CONF
Dir::State::Lists "$work/apt/lists";
Dir::State::status "$work/apt/status";
Dir::Cache "$work/apt/cache";
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "$work/apt/etc";
APT::Sandbox::User "root";
CONF
export APT_CONFIG="$work/apt/apt.conf"
apt-get update -q
apt-get install -q -y --download-only --no-install-recommends $(printf 'librust-%s-dev ' $crates)
for package in "$work"/apt/cache/archives/librust-*.deb; do dpkg-deb -x "$package" "$work/crates"; done
unset APT_CONFIG

# 3. Build against them.
cd "$work/source"
rm -f Cargo.lock
sed -i -e 's/^chrono = .*/chrono = "0.4"/' -e 's/^fern = .*/fern = {version = "0.6", features = ["colored"]}/' \
    -e 's/^gethostname = .*/gethostname = "0.4"/' -e 's/^prost\(.*\) = .*/prost\1 = "*"/' \
    -e 's/^pyo3 = .*/pyo3 = {version = "0.22", features = ["extension-module"]}/' \
    -e '/^slog/d' -e 's/^stderrlog = .*/stderrlog = "0.5"/' Cargo.toml
sed -i -e 's/py\.import(/py.import_bound(/' -e 's/q\.created\.unwrap()/q.created.clone().unwrap()/' src/lib.rs
sed -i 's/created\.unwrap()/created.clone().unwrap()/' templates/status.html
mkdir -p .cargo
printf '[source.crates-io]\nreplace-with = "debian"\n[source.debian]\ndirectory = "%s"\n[net]\noffline = true\n' \
    "$work/crates/usr/share/cargo/registry" > .cargo/config.toml
cargo build --release --lib

# 4. A wheel of it, as maturin makes one. Not in the source's folder: there Python would find a torchft without its library.
cd "$work"
rm -rf wheel
mkdir -p "wheel/torchft-$version.dist-info"
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
tag=$("$python" -c 'import sys, sysconfig; v = "cp%d%d" % sys.version_info[:2]; print(v, v, sysconfig.get_platform().replace("-", "_"), sep="-")')
cp -r source/torchft wheel/
cp source/target/release/libtorchft.so "wheel/torchft/_torchft$suffix"
cp source/PKG-INFO "wheel/torchft-$version.dist-info/METADATA"
printf 'Wheel-Version: 1.0\nGenerator: torchft_from_source.sh\nRoot-Is-Purelib: false\nTag: %s\n' "$tag" > "wheel/torchft-$version.dist-info/WHEEL"
printf '[console_scripts]\ntorchft_lighthouse=torchft._torchft:lighthouse_main\n' > "wheel/torchft-$version.dist-info/entry_points.txt"
"$python" -m pip install -q wheel
"$python" -m wheel pack -d "$wheels" wheel
echo "torchft was built in $((SECONDS / 60)) minutes, and is kept in $wheels"
