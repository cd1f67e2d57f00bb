// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

// output is the output format of a command: table, json or yaml.
type output string

func (o *output) addTo(cmd *cobra.Command) {
	*o = "table"
	cmd.Flags().VarP(o, "output", "o", "table, json or yaml")
}

func (o *output) String() string { return string(*o) }
func (*output) Type() string     { return "format" }

func (o *output) Set(s string) error {
	if forms := []string{"table", "json", "yaml"}; !slices.Contains(forms, s) {
		return fmt.Errorf("expected %s", strings.Join(forms, ", "))
	}
	*o = output(s)
	return nil
}

// print writes v as JSON or YAML, or calls table.
func (o *output) print(w io.Writer, v any, table func(io.Writer)) error {
	if *o == "table" {
		t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
		table(t)
		return t.Flush()
	}
	text, err := json.MarshalIndent(v, "", "  ")
	if err == nil && *o == "yaml" {
		text, err = yaml.JSONToYAML(text)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(w, strings.TrimSuffix(string(text), "\n"))
	return err
}
