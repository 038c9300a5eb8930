#!/bin/sh
# Chromium with its driver, and axe-core, for the tests of the live page. Usage: install_browser.sh FOLDER
set -eu
folder=$1
axe=axe-core@4.14.1
sha512=FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==

if ! command -v chromedriver >/dev/null || ! command -v chromium >/dev/null; then
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "install chromium and chromium-driver with your package manager" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null
fi
chromium --version

if [ ! -f "$folder/axe.min.js" ]; then
  if ! command -v npm >/dev/null; then
    echo "no npm: the test of accessibility is skipped" >&2
    exit 0
  fi
  mkdir -p "$folder"
  npm pack --silent --pack-destination "$folder" $axe >/dev/null
  tarball=$(echo "$folder"/axe-core-*.tgz)
  if [ "$(openssl dgst -sha512 -binary "$tarball" | openssl base64 -A)" != $sha512 ]; then
    echo "$tarball is not the $axe that was reviewed" >&2
    exit 1
  fi
  tar -xzf "$tarball" -C "$folder" --strip-components=1 package/axe.min.js
  rm "$tarball"
fi
echo "$axe is in $folder"
