#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the pictures of the documentation from a running lab: the output of flannel-lab as an
# SVG, and the status page of a host as a browser shows it: pictures.sh FOLDER
set -eu

folder=$1
command='flannel-lab --hosts 3 --backend vxlan'
work=$(mktemp -d)
lab=''
trap '[ -z "$lab" ] || { kill "$lab"; wait "$lab" || true; }; rm -rf "$work"' EXIT
trap 'exit 1' INT TERM # runs the EXIT trap

# shellcheck disable=SC2086 # a list of arguments
bin/$command >"$work/output" 2>&1 &
lab=$!
# The last line that the lab prints is the command for the last pod.
tail -n +1 -f --pid "$lab" "$work/output" | grep -q '^host3/pod1 *nsenter' || {
	cat "$work/output" >&2
	exit 1
}
inside=$(sed -n 's/^host1 *\(nsenter.*\)/\1/p' "$work/output")
# The hosts of the lab all have the name of this machine.
$inside curl -sSf -H 'Accept: text/html' http://127.0.0.1:8081/statusz | sed 's/<h1>[^ ]*/<h1>host1/' >"$work/statusz.html"
chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-background-networking \
	--disable-component-update --disable-sync --host-resolver-rules='MAP * ~NOTFOUND' --user-data-dir="$work/chromium" \
	--hide-scrollbars --window-size=1000,600 --screenshot="$work/statusz.png" "file://$work/statusz.html" 2>"$work/log" || {
	cat "$work/log" >&2
	exit 1
}

# Commands to look inside differ in every run, so the picture ends before them.
sed '/^TO LOOK INSIDE/,$d' "$work/output" | sed '${/^$/d}' | awk -v command="$command" '
function escape(s) { gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s); gsub(/>/, "\\&gt;", s); return s }
function line(s, class) { text = text sprintf("<text x=\"16\" y=\"%d\" class=\"%s\" xml:space=\"preserve\">%s</text>\n", 12 + 18 * ++n, class, escape(s)) }
BEGIN { line("# " command, "command") }
{ line($0, /^(IPv4 FROM|LEASE|HOST) /  ? "title" : /^[0-9]+ of [0-9]+ reachable/ ? "result" : "output"); if (length > width) width = length }
END {
	printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"ui-monospace, DejaVu Sans Mono, Menlo, Consolas, monospace\" font-size=\"14\">\n", 32 + 8.5 * width, 28 + 18 * n
	print "<style>.command{fill:#7ee787}.title{fill:#79c0ff;font-weight:bold}.result{fill:#7ee787}.output{fill:#e6edf3}</style>"
	print "<rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#0d1117\"/>"
	printf "%s</svg>\n", text
}' >"$work/lab.svg"
mkdir -p "$folder"
mv "$work/lab.svg" "$work/statusz.png" "$folder/"
