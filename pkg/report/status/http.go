// SPDX-License-Identifier: Apache-2.0

package status

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
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

// Handler serves the report of source that the parameters of the URL ask for. It answers with JSON
// if the request accepts it or its path ends in .json, otherwise with the page. It answers
// ErrNoNetwork with 404, and other errors of source with 503.
func Handler(source Source) http.Handler {
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
			if err := encoder.Encode(report); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
		} else {
			// The page contains all that it needs, and requests only itself again.
			w.Header().Set("Content-Security-Policy", "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
			body.WriteString(string(page(report)))
		}

		w.Header().Set("Content-Type", contentType)
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = body.WriteTo(w) // a failed write means that the client has gone
	})
}
