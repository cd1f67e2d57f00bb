// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

// output is the output format of a command: table, json, yaml, or one that only this command has.
type output struct {
	format string
	forms  []string // the formats that the command offers
}

// addTo adds the flag --output to cmd. more contains the formats that only this
// command has, besides table, json and yaml.
func (o *output) addTo(cmd *cobra.Command, more ...string) {
	o.format = "table"
	o.forms = append([]string{"table", "json", "yaml"}, more...)
	last := len(o.forms) - 1
	cmd.Flags().VarP(o, "output", "o", strings.Join(o.forms[:last], ", ")+" or "+o.forms[last])
}

func (o *output) String() string { return o.format }
func (*output) Type() string     { return "format" }

func (o *output) Set(s string) error {
	if !slices.Contains(o.forms, s) {
		return fmt.Errorf("expected %s", strings.Join(o.forms, ", "))
	}
	o.format = s
	return nil
}

// print writes v to w as JSON or YAML. For the format table it calls table, which
// writes tab-separated columns.
func (o *output) print(w io.Writer, v any, table func(io.Writer)) error {
	if o.format == "table" {
		t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
		table(t)
		return t.Flush()
	}

	text, err := json.MarshalIndent(v, "", "  ")
	if err == nil && o.format == "yaml" {
		text, err = yaml.JSONToYAML(text)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(w, strings.TrimSuffix(string(text), "\n"))
	return err
}

// list joins values with commas.
func list[T fmt.Stringer](values []T) string {
	texts := make([]string, 0, len(values))
	for _, v := range values {
		texts = append(texts, v.String())
	}
	return strings.Join(texts, ",")
}

func dash(s string) string { return cmp.Or(s, "-") }
