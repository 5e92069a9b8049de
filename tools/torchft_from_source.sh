#!/usr/bin/env bash
# Builds torchft into a virtual environment where there is no wheel of it (aarch64) and no registry of crates: its Rust
# dependencies are taken from Debian's packages of them. Ten minutes, 1 GB. Needs Debian, root, cargo and protoc.
#
#     tools/torchft_from_source.sh build/torchft-env        # an environment that has torch already
#
# Debian's crates are a little older than those that torchft asks for. What differs is four calls, changed below: its
# Python files and its protocol stay as they are.
set -euo pipefail

environment=$(realpath "$1")
work=$(realpath -m "${2:-$environment/torchft-source}")
version=0.2.0
suite=trixie
crates="anyhow askama atty axum chrono fern gethostname log prost prost-types pyo3 rand stderrlog structopt tokio tonic tonic-build"

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
PYTHONPATH="$work/stub" "$environment/bin/python" -m pip download -q --no-deps --no-binary=torchft --no-build-isolation -d "$work" "torchft==$version"
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

# 4. Put it beside torch.
packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
suffix=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
cp -r torchft "$packages/"
cp target/release/libtorchft.so "$packages/torchft/_torchft$suffix"
"$environment/bin/python" -m pip install -q opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
printf '#!%s\nimport sys\nfrom torchft._torchft import lighthouse_main\nsys.exit(lighthouse_main())\n' "$environment/bin/python" > "$environment/bin/torchft_lighthouse"
chmod +x "$environment/bin/torchft_lighthouse"
"$environment/bin/python" -c 'import torchft; print("torchft is in", torchft.__path__[0])'
