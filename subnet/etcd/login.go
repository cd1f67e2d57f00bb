// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/credentials"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// login exchanges the user name and the password for a token, which it adds to every request. The
// token outlives connections: each member knows it until that member is restarted or the token was
// not used for --auth-token-ttl.
//
// A login takes tens of milliseconds of the server's CPU time, even if the client has closed the
// connection. After a restart of etcd all hosts need a login, and thousands at once would use all
// of the server's time. So a host makes one login at a time, and a login continues when the request
// that needs it has timed out. If the previous token has worked, a host first waits for a random
// time: see client.turn. After failures the pauses grow to minutes.
type login struct {
	name, password string
	authenticate   func() (token string, err error)
	turn           func(context.Context) error // waits for a random time, because all hosts need a login at once
	retry          *wait.Backoff               // the pauses after failures; used by one login at a time

	mu      sync.Mutex
	token   string        // empty if etcd does not require one
	valid   bool          // false: the next request needs a login
	worked  bool          // a request has succeeded since the last login began
	before  bool          // a login was started before
	err     error         // the error of the last login; nil if it succeeded
	running chan struct{} // closed when the login in progress ends; nil if there is none
}

// errLoggingIn is the error of a request that did not get a token before its deadline, because the
// login was still in progress.
var errLoggingIn = errors.New("the login is still in progress")

// get returns the token. If there is no valid one, it waits for the login in progress, or starts a
// login, and returns the error of that login if it fails. If ctx ends before the login, get returns
// the error of the previous login or, if there is none, errLoggingIn. The end of ctx does not end a
// login. The end of life does.
func (l *login) get(ctx, life context.Context) (token string, err error) {
	valid, token, running := l.start(life)
	if valid {
		return token, nil
	}

	select {
	case <-running:
	case <-ctx.Done():
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.valid:
		return l.token, nil
	case l.err != nil:
		return "", l.err
	}
	return "", errLoggingIn
}

func (l *login) start(life context.Context) (valid bool, token string, running chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.valid && l.running == nil {
		l.running = make(chan struct{})
		pause := func(context.Context) error { return nil }
		switch {
		case l.worked:
			l.retry.Reset()
			pause = l.turn
		case l.before: // the last login failed, or no request has succeeded with its token
			pause = func(ctx context.Context) error { return l.retry.Wait(ctx, 0) }
		}
		l.before = true
		l.worked = false
		go l.run(life, pause)
	}
	return l.valid, l.token, l.running
}

func (l *login) run(life context.Context, pause func(context.Context) error) {
	var token string
	err := pause(life)
	if err == nil {
		token, err = l.authenticate()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.token = token
	l.valid = err == nil
	l.err = err
	close(l.running)
	l.running = nil
}

// observe records the result of a request with token. It reports whether etcd has refused the
// token. After a refusal the next request needs a login, unless another login has replaced the
// token in the meantime.
func (l *login) observe(token string, err error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case refused(err):
		if l.token == token {
			l.valid = false
		}
		return true
	case err == nil:
		l.worked = true
	}
	return false
}

// refused reports whether err means that etcd has refused the token of a request. In that case etcd
// has not executed the request.
func refused(err error) bool {
	err = rpctypes.Error(err)
	return errors.Is(err, rpctypes.ErrInvalidAuthToken) || errors.Is(err, rpctypes.ErrAuthOldRevision) || errors.Is(err, rpctypes.ErrUserEmpty)
}

// GetRequestMetadata implements credentials.PerRPCCredentials. A login is sent without a token,
// because etcd 3.4 refuses a login with an expired token.
func (l *login) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	info, _ := credentials.RequestInfoFromContext(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.token == "" || info.Method == pb.Auth_Authenticate_FullMethodName {
		return nil, nil //nolint:nilnil // no metadata is valid
	}
	return map[string]string{rpctypes.TokenFieldNameGRPC: l.token}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (*login) RequireTransportSecurity() bool { return false }
