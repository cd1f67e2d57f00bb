// SPDX-License-Identifier: Apache-2.0

// Package blame judges, for tests that cause faults on hosts, what flannelctl says about them.
package blame

import (
	"fmt"
	"slices"
	"strings"
)

// CheckPod is the command check with packets from a pod.
const CheckPod = "check --pod"

// Words are the texts that commands of flannelctl must print about a fault, CheckPod that of check. A line about a
// problem must contain the text of its command, or one of Also.
type Words struct {
	Doctor, Check, Status, Mesh string
	Also                        []string
}

// Text returns the text that a command must print, which may be empty.
func (w Words) Text(command string) string {
	return map[string]string{"doctor": w.Doctor, "check": w.Check, CheckPod: w.Check, "status": w.Status, "mesh": w.Mesh}[command]
}

// Wrong returns an error for each line of the output of a command that blames something else than the fault, or one of
// the other faults, which are by name.
func (w Words) Wrong(command, out string, others map[string]Words) (errs []error) {
	text := w.Text(command)
	permitted := func(line string) bool {
		return text != "" && strings.Contains(line, text) || slices.ContainsFunc(w.Also, func(s string) bool { return strings.Contains(line, s) })
	}

	for _, line := range problems(command, out) {
		if !permitted(line) {
			errs = append(errs, fmt.Errorf("flannelctl %s blames something else than %q: %s", command, text, line))
		}
		for name, other := range others {
			o := other.Text(command)
			if o != "" && !strings.Contains(text, o) && !slices.Contains(w.Also, o) && strings.Contains(line, o) {
				errs = append(errs, fmt.Errorf("flannelctl %s names the cause of the fault %q: %s", command, name, line))
			}
		}
	}
	return errs
}

// problems returns the lines of an output that call something broken, and of tables only the results.
func problems(command, out string) (lines []string) {
	column := map[string]int{"check": 2, CheckPod: 3}[command]
	for line := range strings.Lines(out) {
		wrong := map[string]bool{
			"doctor": strings.HasPrefix(line, "PROBLEM"),
			"status": strings.Contains(line, "(see flannelctl doctor)") || strings.Contains(line, " pods: "),
			"mesh":   strings.Contains(line, " -> ") || strings.Contains(line, " are cut off: "),
		}[command]
		cells := strings.Fields(line)
		if column > 0 && len(cells) > column && strings.ContainsAny(cells[0], "./") { // a row
			wrong = cells[column] != "ok" && cells[column] != "unknown"
			line = cells[column]
		}
		if wrong {
			lines = append(lines, line)
		}
	}
	return lines
}
