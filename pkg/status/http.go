// SPDX-License-Identifier: Apache-2.0

package status

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"slices"
	"strings"
	"time"
)

// ErrNoNetwork means that the daemon does not serve a network with the requested name.
var ErrNoNetwork = errors.New("no such network")

// Query says what a report is about.
type Query struct {
	// Network is the name of a network. Without a name the report is about the only network, or
	// about all of several.
	Network string
	// AllPaths asks for all paths instead of the worst ones, and for neither peers nor events. Such
	// reports of all hosts together show which hosts reach each other.
	AllPaths bool
}

// The parameters of a URL that make a Query. The value of ParamPaths is AllPaths.
const (
	ParamNetwork = "network"
	ParamPaths   = "paths"
	AllPaths     = "all"
)

// Source makes a report. It returns ErrNoNetwork, wrapped, for an unknown name of a network.
type Source func(ctx context.Context, q Query) (Report, error)

//go:embed page.html
var pageText string

// Handler serves the report of source that the parameters of the URL ask for. It answers with JSON
// if the request accepts it or its path ends in .json, otherwise with the page. It answers
// ErrNoNetwork with 404, and other errors of source with 503.
func Handler(source Source) (http.Handler, error) {
	page, err := template.New("status").Funcs(template.FuncMap{
		"join": join, "ago": ago, "kinds": kinds, "missing": missing,
	}).Parse(pageText)
	if err != nil {
		return nil, err
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		params := r.URL.Query()
		q := Query{Network: params.Get(ParamNetwork), AllPaths: params.Get(ParamPaths) == AllPaths}
		report, err := source(r.Context(), q)
		if err != nil {
			code := http.StatusServiceUnavailable
			if errors.Is(err, ErrNoNetwork) {
				code = http.StatusNotFound
			}
			http.Error(w, err.Error(), code)
			return
		}
		var body bytes.Buffer
		contentType := "text/html; charset=utf-8"
		if strings.HasSuffix(r.URL.Path, ".json") || strings.Contains(r.Header.Get("Accept"), "application/json") {
			contentType = "application/json"
			encoder := json.NewEncoder(&body)
			if !q.AllPaths { // programs read all paths, and white space would double their size
				encoder.SetIndent("", "  ")
			}
			err = encoder.Encode(report)
		} else {
			// The page contains all that it needs: it loads nothing and sends nothing.
			w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
			err = page.Execute(&body, view{report})
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", contentType)
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = body.WriteTo(w) // a failed write means that the client has gone
	}), nil
}

// view is the report with the methods that the page calls.
type view struct{ Report }

// Columns returns the column titles of the table of peers.
func (view) Columns() []string {
	return []string{"Subnet", "Public IP", "Type", "State", "Kernel", "Changed", "Error"}
}

// Newest returns the events of the report, newest first.
func (v view) Newest() []Event {
	newest := slices.Clone(v.Events)
	slices.Reverse(newest)
	return newest
}

// join returns the elements of a list of prefixes or addresses as one text, separated by commas.
func join(values any) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(values), "[]"), " ", ", ")
}

// ago describes how long before now t was, in rough units. It says "in" for a time in the future,
// and "never" for the zero time.
func ago(now, t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	d := now.Sub(t)
	if d < 0 {
		return "in " + coarse(-d)
	}
	return coarse(d) + " ago"
}

func coarse(d time.Duration) string {
	switch {
	case d < time.Second:
		return "a moment"
	case d < 2*time.Minute:
		return d.Truncate(time.Second).String()
	case d < 2*time.Hour:
		return strings.TrimSuffix(d.Truncate(time.Minute).String(), "0s")
	case d < 48*time.Hour:
		return strings.TrimSuffix(d.Truncate(time.Hour).String(), "0m0s")
	default:
		return strings.TrimSuffix((d/24).Truncate(time.Hour).String(), "h0m0s") + "d"
	}
}

// kinds returns the kinds of kernel objects in the order in which the page shows them.
func kinds() []string { return []string{"link", "address", "neighbour", "fdb", "route"} }

// missing reports whether some wanted objects are absent.
func missing(c Count) bool { return c.Present < c.Wanted }
