// SPDX-License-Identifier: Apache-2.0

package vpctest

import "net/http"

// Metadata returns a metadata service with these values, by their paths below /latest/meta-data/. It refuses requests
// without the token of a session in the header with that name, and for a token without the header that ends in
// -ttl-seconds. Like that of EC2, it returns this header. If header is empty, there are no sessions.
func Metadata(header string, values map[string]string) http.Handler {
	const session = "session-of-the-metadata-service"
	ttl := header + "-ttl-seconds"
	mux := http.NewServeMux()
	mux.HandleFunc("PUT /latest/api/token", func(w http.ResponseWriter, r *http.Request) {
		if header == "" || r.Header.Get(ttl) == "" {
			http.Error(w, "no time to live", http.StatusBadRequest)
			return
		}
		w.Header().Set(ttl, r.Header.Get(ttl))
		_, _ = w.Write([]byte(session))
	})

	for path, text := range values {
		mux.HandleFunc("GET /latest/meta-data/"+path, func(w http.ResponseWriter, r *http.Request) {
			if header != "" && r.Header.Get(header) != session {
				http.Error(w, "no session", http.StatusUnauthorized)
				return
			}
			_, _ = w.Write([]byte(text))
		})
	}
	return mux
}
