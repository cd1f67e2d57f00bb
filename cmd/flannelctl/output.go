// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/wait"
)

// output is the output format of a command: table, json, yaml, or one that not all commands have, such as
// wide and name.
type output struct {
	format string
	forms  []string // the formats that the command offers
}

// addTo adds the flag --output to cmd. more contains the formats that this command has
// besides table, json and yaml.
func (o *output) addTo(cmd *cobra.Command, more ...string) {
	o.format = "table"
	o.forms = append([]string{"table", "json", "yaml"}, more...)
	last := len(o.forms) - 1
	cmd.Flags().VarP(o, "output", "o", strings.Join(o.forms[:last], ", ")+" or "+o.forms[last])
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(o.forms, cobra.ShellCompDirectiveNoFileComp)) // fails only without the flag
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

// print writes v to w as JSON or YAML. For the other formats it calls text, which
// writes tab-separated columns.
func (o *output) print(w io.Writer, v any, text func(io.Writer)) error {
	if o.hasRows() {
		t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
		text(t)
		return t.Flush()
	}

	data, err := json.MarshalIndent(v, "", "  ")
	if err == nil && o.format == "yaml" {
		data, err = yaml.JSONToYAML(data)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(w, strings.TrimSuffix(string(data), "\n"))
	return err
}

// hasRows reports whether the format is that of a table, or of one name a line.
func (o *output) hasRows() bool { return o.format != "json" && o.format != "yaml" }

// table writes the rows of a table or, with -o name, only the name of each.
type table struct {
	io.Writer
	*output
	titles []string
	// longest are the longest cells of the columns. If there are none, a tabwriter aligns the columns.
	longest []string
}

// table writes the titles of the columns, which tabs separate. A column whose title begins with + is only for -o wide.
// With the longest cell of each column, each row is printed at once. Otherwise w must be the writer of print.
func (o *output) table(w io.Writer, titles string, longest ...string) table {
	t := table{w, o, strings.Split(titles, "\t"), longest}
	if o.format != "name" {
		var cells []any
		for _, title := range t.titles {
			cells = append(cells, strings.TrimPrefix(title, "+"))
		}
		t.row("", cells...)
	}
	return t
}

// row writes a row. Programs such as xargs get its name.
func (t table) row(name string, cells ...any) {
	if t.format == "name" {
		fmt.Fprintln(t, name)
		return
	}
	gap := "\t"
	if len(t.longest) > 0 {
		gap = "   "
	}
	var shown []string
	for i, title := range t.titles {
		cell := fmt.Sprint(cells[i])
		if len(t.longest) > 0 {
			cell = fmt.Sprintf("%-*s", max(len(strings.TrimPrefix(title, "+")), len(t.longest[i])), cell)
		}
		if t.format == "wide" || !strings.HasPrefix(title, "+") {
			shown = append(shown, cell)
		}
	}
	fmt.Fprintln(t, strings.TrimRight(strings.Join(shown, gap), " "))
}

// follow calls look, with pauses, until it returns an empty text or ctx ends. Any other text says what is
// waited for, and is printed if it is new.
func follow(ctx context.Context, w io.Writer, pause time.Duration, look func() string) error {
	for said := ""; ; {
		now := look()
		if now == "" {
			return nil
		}
		if now != said {
			said = now
			fmt.Fprintln(w, now)
		}
		if err := wait.For(ctx, pause); err != nil {
			return err
		}
	}
}

// list joins values with commas.
func list[T fmt.Stringer](values []T) string { return strings.Join(oneline.Strings(values), ",") }

func dash(s string) string { return cmp.Or(s, "-") }

// number returns n in decimal, or a dash if it is 0, which means that it is not known.
func number(n int) string {
	if n == 0 {
		return "-"
	}
	return strconv.Itoa(n)
}
