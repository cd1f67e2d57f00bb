// SPDX-License-Identifier: Apache-2.0

package cloud_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
)

func TestCallsAreRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cloud.Calls
		calls, begin := 0, time.Now()
		err := c.Make(t.Context(), "CreateRoute (dry run)", "CreateRoute", func() error {
			if calls++; calls < 4 {
				return cloud.ErrThrottled
			}
			return nil
		})
		if took := time.Since(begin); err != nil || calls != 4 || took < time.Second {
			t.Errorf("%v after %d calls in %v, want a success with pauses", err, calls, took)
		}
		want := []cloud.CallCount{{Name: "CreateRoute (dry run)", Result: "ok", N: 1}, {Name: "CreateRoute (dry run)", Result: "throttled", N: 3}}
		if got := c.Counts(); !slices.Equal(got, want) {
			t.Errorf("counts %v, want %v", got, want)
		}
		calls = 0
		err = c.Make(t.Context(), "x", "CreateRoute", func() error { calls++; return cloud.ErrThrottled })
		if !errors.Is(err, cloud.ErrThrottled) || err.Error() != "CreateRoute: "+cloud.ErrThrottled.Error() || calls > 10 {
			t.Errorf("%v after %d calls, want it to give up", err, calls)
		}
		calls = 0
		if err := c.Make(t.Context(), "x", "x", func() error { calls++; return cloud.ErrUnavailable }); err == nil || calls != 1 {
			t.Errorf("%v after %d calls, want no repetition of another error", err, calls)
		}
	})
}

func TestMissingErrorWithoutPermissions(t *testing.T) {
	if text := (&cloud.MissingError{Page: "page.md"}).Error(); !strings.Contains(text, "page.md") {
		t.Errorf("error %q, want the page", text)
	}
}

func TestRights(t *testing.T) {
	var r cloud.Rights
	for _, err := range []error{nil, errors.New("there is no such route"), &cloud.MissingError{Permissions: []string{"b"}}, &cloud.MissingError{Permissions: []string{"b", "a"}}} {
		if got := r.Note(err); got != nil {
			t.Errorf("%v: error %v, want none", err, got)
		}
	}
	for _, err := range []error{cloud.ErrThrottled, cloud.ErrUnavailable, cloud.ErrKeys} {
		if got := r.Note(err); !errors.Is(got, err) {
			t.Errorf("error %v, want %v", got, err)
		}
	}
	r.Lack("c")
	if err := r.Missing("page.md"); err == nil || err.Error() != "permissions b, a, c are missing: page.md has the policy to paste" {
		t.Errorf("error %v, want all rights named once", err)
	}
	if err := new(cloud.Rights).Missing("page.md"); err != nil {
		t.Errorf("error %v, want none", err)
	}
}
