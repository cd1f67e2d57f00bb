package lab_test

import (
	"testing"

	"go.uber.org/goleak"

	"flanneld/pkg/lab"
)

func TestMain(m *testing.M) {
	lab.RunChild()
	runTestChild()
	goleak.VerifyTestMain(m)
}
