#!/bin/sh
# Install a browser for the test of examples/serving_web.html: Debian's Chromium and its driver, where apt-get is there and may install.
#
# Without one that test is skipped, and says so. So nothing here is an error.
set -u
command -v chromedriver >/dev/null 2>&1 && exit 0
as_root=
[ "$(id -u)" = 0 ] || as_root='sudo -n'
log=$(mktemp)
if command -v apt-get >/dev/null 2>&1 && timeout 60 $as_root apt-get update -qq >"$log" 2>&1 &&
    timeout 300 $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >>"$log" 2>&1; then
    echo 'browser: chromium and chromium-driver are installed'
else
    tail -n 3 "$log"
    echo 'browser: none was installed; its test is skipped'
fi
rm -f "$log"
