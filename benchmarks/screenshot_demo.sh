#!/bin/sh
# The picture in the README: the top of a demo's page, 1200 pixels wide, light, by headless Chromium.
#
#   benchmarks/screenshot_demo.sh [PAGE] [PICTURE]      results/demo/index.html docs/images/demo.png
set -eu
page=${1:-results/demo/index.html}
picture=${2:-docs/images/demo.png}
height=${HEIGHT:-1480}

test -f "$page" || { echo "$page: no such page; run \`longturn demo\` first" >&2; exit 1; }
browser=
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then browser=$name; break; fi
done
test -n "$browser" || { echo "none of chromium, chromium-browser, google-chrome is on the PATH" >&2; exit 1; }

mkdir -p "$(dirname "$picture")"
folder=$(CDPATH='' cd -- "$(dirname "$page")" && pwd)
target=$(CDPATH='' cd -- "$(dirname "$picture")" && pwd)/$(basename "$picture")
"$browser" --headless=new --no-sandbox --disable-gpu --hide-scrollbars --force-device-scale-factor=1 \
    --blink-settings=preferredColorScheme=1 --window-size=1200,"$height" \
    --screenshot="$target" "file://$folder/$(basename "$page")" 2>/dev/null
echo "$picture"
