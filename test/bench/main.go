package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"flanneld/pkg/lab"
)

func main() {
	lab.RunChild()
	ctx := context.Background()
	b, err := newBed(ctx, os.Args[1])
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	defer b.close()
	n := 5000
	for _, be := range []string{"vxlan", "host-gw"} {
		t := time.Now()
		if err := b.configure(ctx, be, n); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("configure", time.Since(t))
		for range 5 {
			if err := b.clean(ctx, b.lab.Host(1)); err != nil {
				fmt.Println(err)
			}
			for _, plain := range []bool{false, true} {
				k := objectsOf(be)
				k.nexthop = !plain
				took, cpu, err := b.limit(ctx, nil, b.peers, k)
				fmt.Println(be, "limit nexthop", !plain, took, cpu, err)
			}
			b.settle(ctx)
			c, cancel := context.WithTimeout(ctx, 10*time.Second)
			s, err := b.begin(c)
			cancel()
			fmt.Println(be, s.all, s.file, s.cpu, s.peak/1e6, err)
			if err == nil {
				fmt.Println(b.verify(ctx, b.lab.Host(1), n))
			}
		}
	}
}
