// SPDX-License-Identifier: Apache-2.0

package main

import (
	"regexp"
	"strings"
)

const redacted = "[redacted]"

// leastSecret is the length in bytes of the shortest secret that is taken out wherever it stands. A shorter one may be a
// part of any word, so it is taken out only behind its name.
const leastSecret = 6

// scrubber takes secrets out of texts. It knows them by their form, by the name before them, and if it has learned them.
type scrubber struct{ known map[string]bool }

var (
	// named matches a name that tells that a secret follows, as in a file of variables, in JSON, also as a quoted part of a
	// log line, in YAML and in sysctl's output.
	named = regexp.MustCompile(`(?i)([\w.-]*(?:password|passwd|secret|token|psk|preshared_?key|private_?key|access_?key|fastopen_key)[\w-]*\\*["']?\s*[:=]\s*)` +
		`(\\*"(?:[^"\\]|\\[^"])*\\*"|'[^']*'|[^\s"',;\\]+)`)
	inURL  = regexp.MustCompile(`(\w://)[^/\s"']+@`)
	bearer = regexp.MustCompile(`(?i)(bearer\s+)[\w.~+/=-]+`)
	jwt    = regexp.MustCompile(`\beyJ[\w-]+\.[\w-]+\.[\w-]*`)
	pem    = regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)`)
)

// learn remembers the secrets in a text, each of which follows its name.
func (s *scrubber) learn(text string) {
	for _, m := range named.FindAllStringSubmatch(text, -1) {
		s.add(strings.Trim(m[2], `\"'`))
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
	return named.ReplaceAllString(text, "${1}"+redacted)
}
