#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks that each file of the tree names its license in one of its first three lines. The first
# ones may be for the program that reads the file, as in scripts and HTML.
set -euo pipefail
cd "$(dirname "$0")/../.."

# Files that cannot contain a comment, that a program generates, or that are pages for readers.
without=(
	LICENSE '*.md'
	'*.json' '*.png'                     # formats without comments
	'*.svg' '*.golden'                   # generated pictures and expected output
	'*/testdata/*.txt'                   # scripts: go test -update writes their output
	'*/testdata/fuzz/*'                  # inputs that go test writes
	go.mod go.sum '*/go.mod' '*/go.sum'  # maintained by the go command
)

files=$(git ls-files --cached --others --exclude-standard -- . "${without[@]/#/:(exclude)}")
missing=0
while IFS= read -r file; do
	[ -e "$file" ] || continue # removed, and not committed yet
	mapfile -t -n 3 first <"$file"
	[[ "${first[*]}" == *'SPDX-License-Identifier: Apache-2.0'* ]] && continue
	echo "$file: no line \"SPDX-License-Identifier: Apache-2.0\" among the first three lines: add it as a comment"
	missing=1
done <<<"$files"
exit $missing
