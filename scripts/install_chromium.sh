#!/bin/sh
# Installs Chromium for the tests of the page (tests/system/test_page.py), on Debian and its kin, as root.
# Where it cannot, it says what is missing and still ends well: those tests are then skipped, with a reason.
set -u

for name in "${QUARTET_TEST_CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do
    if [ -n "$name" ] && command -v "$name" >/dev/null 2>&1; then
        echo "chromium: $(command -v "$name")"
        exit 0
    fi
done

if ! command -v apt-get >/dev/null 2>&1; then
    why="there is no apt-get here"
elif [ "$(id -u)" -ne 0 ]; then
    why="only root installs packages: sudo apt-get install --no-install-recommends chromium fonts-dejavu-core"
elif apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
    apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; then
    echo "chromium: $(command -v chromium)"
    exit 0
else
    why="apt-get failed"
fi
echo "chromium: not installed, $why. The page's tests are skipped; QUARTET_TEST_CHROMIUM names another command" >&2
