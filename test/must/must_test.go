// SPDX-License-Identifier: Apache-2.0

package must

import (
	"io"
	"strconv"
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
	if err != io.EOF || after { //nolint:errorlint // Catch must return the error itself
		t.Errorf("Catch returns %v, and the step after the failure ran: %v", err, after)
	}
	if err := Catch(func() { t.Errorf("Get returned %d", Get(strconv.Atoi("x"))) }); err == nil {
		t.Error("Catch returns no error of Get")
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
