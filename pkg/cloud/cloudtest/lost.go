// SPDX-License-Identifier: Apache-2.0

package cloudtest

import (
	"bytes"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
)

// LoseAnswers returns a handler that passes requests to h, and the function lose. After a call of lose, the
// handler drops one answer: it closes the connection instead of sending the answer. It drops the next answer
// with the status 200 to a request for which changes reports true.
func LoseAnswers(h http.Handler, changes func(r *http.Request, body string) bool) (handler http.Handler, lose func()) {
	var next atomic.Bool
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		answer := httptest.NewRecorder()
		h.ServeHTTP(answer, r)
		if answer.Code == http.StatusOK && changes(r, string(body)) && next.CompareAndSwap(true, false) {
			if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
				_ = conn.Close()
			}
			return
		}

		maps.Copy(w.Header(), answer.Header())
		w.WriteHeader(answer.Code)
		_, _ = w.Write(answer.Body.Bytes())
	}), func() { next.Store(true) }
}
