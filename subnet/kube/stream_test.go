package kube

import (
	"io"
	"net/http"
	"net/url"
	"testing"
	"testing/iotest"
	"testing/synctest"
)

// lastMoment answers a request when its context ends.
type lastMoment struct{}

func (lastMoment) RoundTrip(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(iotest.ErrReader(r.Context().Err()))}, nil
}

// A watch that is taken as it is given up is one that came to nothing, which Keep
// tries again, not the end of what it is for.
func TestWatchTakenAtTheLastMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &client{base: &url.URL{Scheme: "https", Host: "api"}, http: &http.Client{Transport: lastMoment{}}}
		err := c.watch(t.Context(), &decoder{}, query{revision: 1}, func() { t.Error("it is taken for one that lives") }, nil)
		if !passes(err) {
			t.Errorf("got %v, want an error that passes", err)
		}
	})
}
