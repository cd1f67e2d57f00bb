package dataplanetest

import "testing"

func TestContract(t *testing.T) {
	Contract(t, func(testing.TB) World { return New() })
}

func TestRandomWalk(t *testing.T) {
	Walk(t, New(), 3000)
}
