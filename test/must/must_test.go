// SPDX-License-Identifier: Apache-2.0

package must

import (
	"errors"
	"io"
	"strconv"
	"strings"
	"testing"
)

func TestCatch(t *testing.T) {
	if err := Catch(func() { Do(nil) }); err != nil {
		t.Errorf("without a failure Catch returns %v", err)
	}
	after := false
	err := Catch(func() {
		Do(io.EOF)
		after = true
	})
	if !errors.Is(err, io.EOF) || !strings.HasPrefix(err.Error(), "must_test.go:") || after {
		t.Errorf("Catch returns %v, and the step after the failure ran: %v", err, after)
	}
	if err := Catch(func() { t.Errorf("Get returned %d", Get(strconv.Atoi("x"))) }); err == nil || !strings.HasPrefix(err.Error(), "must_test.go:") {
		t.Errorf("Catch returns %v, want an error of Get and its line", err)
	}
	if err := Catch(func() { Fail("%d is too many", 3) }); err == nil || err.Error() != "3 is too many" {
		t.Errorf("Catch returns %v", err)
	}
}

// TestCatchLeavesDefects checks that Catch does not hide a panic that is a defect of the program.
func TestCatchLeavesDefects(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("Catch has hidden a panic")
		}
	}()
	_ = Catch(func() { panic("defect") })
}
