// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"go.etcd.io/etcd/server/v3/storage/wal"
)

// etcdChild is the value of os.Args[0] with which RunChild runs the store.
const etcdChild = "flannel-lab-etcd"

// RunChild must be the first call in main, or in TestMain, of every binary that builds
// labs. To run the store, the lab starts the same binary, or EtcdOptions.Program, a second
// time with another argument 0. In that process RunChild is the program etcd and does not
// return. In all others it returns at once.
func RunChild() {
	if os.Args[0] != etcdChild {
		return
	}
	// Small, because etcd allocates a segment in advance, and on tmpfs it takes memory.
	wal.SegmentSizeBytes = 4 << 20
	etcdmain.Main(os.Args)
	os.Exit(0)
}
