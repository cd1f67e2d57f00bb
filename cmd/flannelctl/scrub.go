// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
)

const redacted = "[redacted]"

// leastSecret is the length in bytes of the shortest secret that is taken out wherever it stands. A shorter one may be a
// part of any word, so it is taken out only behind its name.
const leastSecret = 6

const (
	secretName = `(?:password|passwd|secret|token|psk|preshared_?key|private_?key|access_?key|fastopen_key)`
	// quoted is a text in quotes, in which others are escaped, or one in escaped quotes.
	quoted = `"(?:[^"\\]|\\.)*"|\\+"(?:[^"\\]|\\[^"])*\\+"`
)

// scrubber takes secrets out of texts. It knows them by their form, by the name before them, and if it has learned them.
type scrubber struct{ known map[string]bool }

var (
	// named matches a name that tells that a secret follows, as in a file of variables, in JSON, also as a quoted part of a
	// log line, in YAML and in sysctl's output.
	// The value is no object or list of JSON.
	named = regexp.MustCompile(`(?i)([\w.-]*` + secretName + `[\w-]*\\*["']?\s*[:=]\s*)` +
		`(` + quoted + `|'[^']*'|[^\s"',;\\]*[^\s"',;\\{[][^\s"',;\\]*)`)
	// inList matches a variable of a container, and two arguments of a command, in JSON.
	inList = regexp.MustCompile(`(?i)(\\*"(?:[\w.-]*` + secretName + `[\w-]*\\*",\s*\\*"value\\*":|--[\w-]*` + secretName + `[\w-]*\\*",)\s*)(` + quoted + `)`)
	inURL  = regexp.MustCompile(`(\w://)[^/\s"']+@`)
	bearer = regexp.MustCompile(`(?i)(bearer\s+)[\w.~+/=-]+`)
	jwt    = regexp.MustCompile(`\beyJ[\w-]+\.[\w-]+\.[\w-]*`)
	pem    = regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)`)
)

// learn remembers the secrets in a text, each of which follows its name.
func (s *scrubber) learn(text string) {
	for _, m := range slices.Concat(named.FindAllStringSubmatch(text, -1), inList.FindAllStringSubmatch(text, -1)) {
		if strings.Contains(strings.ToLower(m[1]), "secretname") { // of an object of Kubernetes
			continue
		}
		s.add(strings.Trim(m[2], `\"'`))
		var decoded string
		if err := json.Unmarshal([]byte(m[2]), &decoded); err == nil {
			s.add(decoded)
		}
	}
}

// add remembers a secret.
func (s *scrubber) add(secret string) {
	if secret = strings.TrimSpace(secret); len(secret) >= leastSecret {
		s.known[secret] = true
	}
}

func (s *scrubber) scrub(text string) string {
	for secret := range s.known {
		text = strings.ReplaceAll(text, secret, redacted)
	}
	text = pem.ReplaceAllLiteralString(text, redacted)
	text = inURL.ReplaceAllString(text, "${1}"+redacted+"@")
	text = bearer.ReplaceAllString(text, "${1}"+redacted)
	text = jwt.ReplaceAllLiteralString(text, redacted)
	for _, form := range []*regexp.Regexp{inList, named} {
		text = form.ReplaceAllStringFunc(text, func(found string) string {
			m := form.FindStringSubmatch(found)
			switch {
			case m[2] == "true" || m[2] == "false":
				return found
			case strings.HasPrefix(m[2], `"`): // JSON stays JSON
				return m[1] + `"` + redacted + `"`
			}
			return m[1] + redacted
		})
	}
	return text
}
