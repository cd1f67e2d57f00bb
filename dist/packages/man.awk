# SPDX-License-Identifier: Apache-2.0
# Turns a page of Documentation without links into input of go-md2man: with a title and what the
# command does, and with lists in place of tables and of the output of --help, because both are wider
# than a terminal.
NR == 1 {
	printf "%% \"%s\" \"%s\" \"%s\" \"flanneld %s\"\n", toupper(name), section, date, version
	printf "# NAME\n%s - %s\n\n# SYNOPSIS\n%s\n\n# DESCRIPTION\n", name, does, synopsis
	next
}
/^After this page/ { opening = 1 } # says what a reader of the page learns
opening { opening = $0 != ""; next }
/^```/ { help = !help; next }
/--help` prints this/ { next }

help && /^Usage:/ { getline; getline; next } # the synopsis
help && /^[A-Z].*:$/ {
	print (options++ ? "" : "# OPTIONS\n") "### " substr($0, 1, length($0) - 1)
	next
}
help && /^  --/ { printf "\n`%s`%s\n: ", $1, ($2 ? ", `" $2 "`" : ""); next }
help { sub(/^ +/, "") }

/^\|[-|]+$/ { next }
/^\|/ {
	gsub(/\\\|/, "\001") # a bar in a cell
	n = split($0, cell, / *\| */) # the first and the last are empty
	for (i = 2; i < n; i++) gsub("\001", "|", cell[i])
	if (!columns) { # the heading
		for (columns = i = 2; i < n; i++) heading[i] = cell[i]
		next
	}
	printf "\n%s%s\n: ", (n > 4 ? heading[2] " " : ""), cell[2]
	separator = ""
	for (i = 3; i < n; i++) {
		if (cell[i] == "") continue
		printf "%s%s%s", separator, (n > 4 ? heading[i] ": " : ""), cell[i]
		separator = "; "
	}
	print ""
	next
}
{ columns = 0; print }

# A line of its own, because a URL must not be hyphenated.
END { print "\n# SEE ALSO\n**flanneld**(8), **flannelctl**(1), and the pages at\n\n    https://" ENVIRON["MODULE"] }
